"""Ranks as a launcher's watch sees them, made up: their heartbeats are in a real store, their time is the test's."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.launch.fake_processes import FakeProcesses
from uneven.comm.store import open_store
from uneven.hardware.device import parse_devices
from uneven.hardware.roster import Roster
from uneven.launch.control.leave_requests import LeaveRequest
from uneven.launch.heartbeat import GENERATION_KEY, heartbeat_key, ready_key, roster_key, settled_key, suspicion_key
from uneven.launch.local_ranks import Newcomer
from uneven.launch.watch import watch as watch_module
from uneven.launch.watch.generations import Generations
from uneven.launch.watch.watch import Watch
from uneven.results.progress import Reporter
from uneven.train.rank_info import Generation
from uneven.train.requests import Requests

MEMBERS = ("pc/cpu/a", "pc/cpu/b", "mini/cpu/c")
ROSTER = Roster(parse_devices("cpu,cpu,cpu@0.4"), (0, 0, 1), ("pc", "mini"))


class Lines(Reporter):
    """Keeps what the user would read."""

    def __init__(self) -> None:
        super().__init__("lines")
        self.lines: list[str] = []

    def say(self, lines: Any) -> None:
        self.lines += lines


class Cluster(FakeProcesses):
    """Three ranks that train on, each with a new heartbeat at every look; a look takes a tenth of a second.

    `at` says what happens before which look.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, _ = open_store()
        self.folder, self.codes, self.gone = folder, [None, None, None], dict[int, str]()
        self.statuses: list[dict[str, Any]] = [{"min_ranks": 1, "slot": 3, "phase": "compute"} for _ in MEMBERS]
        self.silent: set[int] = set()
        self.given_up: list[int] = []
        self.at: dict[int, Callable[[], Any]] = {}
        self.looks = 0
        self.members: list[str] = list(MEMBERS)
        self.stays: set[int] = set()  # who still runs at the end
        self.requested: list[LeaveRequest] = []  # since the last look
        self.reporter = Lines()
        clock = SimpleNamespace(monotonic=lambda: self.looks / 10, sleep=lambda _: None)
        monkeypatch.setattr(watch_module, "time", clock)
        monkeypatch.setattr(watch_module, "GRACE_S", 0.0)

    codes: list[Any]
    requests: Requests  # of the watch that is on

    def exit_codes(self) -> list[Any]:
        """The watch begins every look with it."""
        return list(self.codes)

    def lost(self) -> dict[int, str]:
        return self.gone

    def give_up(self, number: int) -> None:
        self.given_up.append(number)

    def watch(self, looks: int = 5) -> None:
        """So many looks, and then all ranks that run have ended well."""
        processes: Any = self
        watch = Watch(processes, self.store, self.folder, Generations(ROSTER, MEMBERS), self.reporter)
        self.requests = Requests()
        for self.looks in range(1, looks + 1):
            self.at.get(self.looks, lambda: None)()
            for number, member in enumerate(self.members):
                if number not in self.silent and self.codes[number] is None:
                    status = {"count": self.looks, "member": member, "rank": number, **self.statuses[number]}
                    self.store.set(heartbeat_key(member), json.dumps(status))
            assert not watch._look(self.requests)
        self.looks += 1
        self.codes = [0 if code is None and n not in self.stays else code for n, code in enumerate(self.codes)]
        assert watch._look(self.requests)

    def asked(self) -> list[LeaveRequest]:
        found, self.requested = self.requested, []
        return found

    def end(self, number: int, code: int, **error: Any) -> Callable[[], None]:
        def end() -> None:
            self.codes[number] = code
            if error:
                report = {
                    "time": 1.0,
                    "member": self.members[number],
                    "kind": "other",
                    "traceback": "in step",
                    "slot": 3,
                }
                report |= {"message": error["what"], **error}
                (self.folder / f"error-{number}.json").write_text(json.dumps(report))

        return end

    def suspect(self, number: int, generation: int, cause: str = "connection reset") -> None:
        self.store.set(suspicion_key(generation, MEMBERS[number]), cause)

    @property
    def generation(self) -> Generation | None:
        if not self.store.check([GENERATION_KEY]):
            return None
        number = int(self.store.get(GENERATION_KEY))
        return Generation.from_json(json.loads(self.store.get(roster_key(number))))


class Recruiting(Cluster):
    """A cluster that a machine joins at a look, and whose first machine can start ranks again."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(folder, monkeypatch)
        self.statuses = [{**status, "admits": True, "restarts": 1} for status in self.statuses]
        self.coming: list[Newcomer] = []
        self.turned_away: dict[int, str] = {}
        self.let_gone: dict[int, str] = {}
        self.dropped: dict[int, str] = {}

    def arrivals(self, number: int, present: Generation) -> list[Newcomer]:
        assert number == len(self.codes)
        found, self.coming = self.coming, []
        for newcomer in found:
            self._start(newcomer)
        return found

    def restart(self, lost: int, number: int, present: Generation) -> Newcomer | None:
        assert number == len(self.codes)
        if lost == 2:
            return None  # of the other machine
        newcomer = Newcomer(f"pc/cpu/again-{number}", present.roster.devices[0], "pc")
        self._start(newcomer)
        return newcomer

    def turn_away(self, number: int, why: str) -> None:
        self.turned_away[number] = why

    def let_go(self, number: int, line: str) -> None:
        self.let_gone[number] = line

    def lose(self, number: int, line: str) -> None:
        self.dropped[number] = line

    def _start(self, newcomer: Newcomer) -> None:
        self.codes.append(None)
        self.members.append(newcomer.member)
        self.statuses.append({"slot": 0, "phase": "setup"})

    def ready(self, *numbers: int) -> Callable[[], None]:
        return lambda: [self.store.set(ready_key(self.members[number]), "1") for number in numbers] and None

    def settle(self, number: int) -> Callable[[], None]:
        def settle() -> None:
            assert self.generation is not None
            self.store.set(settled_key(self.generation.number, self.members[number]), "1")
            self.statuses[number] = dict(self.statuses[0])

        return settle


LAPTOP = [Newcomer(f"laptop/cpu/{one}", parse_devices("cpu")[0], "laptop") for one in "xy"]
