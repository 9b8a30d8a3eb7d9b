"""The watch on made-up processes and heartbeats: which rank is named as the cause."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.fake_processes import FakeProcesses
from uneven import InputError
from uneven.comm.store import open_store
from uneven.errors import RankError
from uneven.hardware.device import parse_devices
from uneven.hardware.roster import Roster
from uneven.launch.heartbeat import heartbeat_key
from uneven.launch.watch.generations import Generations
from uneven.launch.watch.lost import RankHealth
from uneven.launch.watch.watch import Watch
from uneven.results.progress import Reporter
from uneven.train.requests import Requests

MEMBERS = ["host/cpu/aa", "host/cpu/bb"]
ROSTER = Roster.on_one_machine(parse_devices("cpu,cpu@0.4"))


@pytest.fixture
def store() -> Iterator[Any]:
    store, _ = open_store()
    yield store
    del store


def beat(store: Any, member: str, rank: int) -> None:
    status = {"count": 1, "member": member, "rank": rank, "slot": 3, "phase": "compute"}
    store.set(heartbeat_key(member), json.dumps(status))


def watch(store: Any, folder: Path, *codes: int) -> None:
    processes: Any = FakeProcesses(lambda: list(codes))
    Watch(processes, store, folder, Generations(ROSTER, MEMBERS), Reporter("off")).wait(Requests())


def fail(folder: Path, number: int, time: float, what: str, kind: str = "other") -> None:
    report = {"time": time, "kind": kind, "message": what, "what": f"ValueError: {what}", "traceback": f"in {what}"}
    (folder / f"error-{number}.json").write_text(json.dumps({**report, "member": MEMBERS[number]}))


def test_processes_that_ended_well_end_the_watch(store: Any, tmp_path: Path) -> None:
    watch(store, tmp_path, 0, 0)


def test_a_failed_process_is_named_by_its_present_rank(store: Any, tmp_path: Path) -> None:
    """Ranks change when machines come and go: process 1 of this launcher may be rank 0."""
    beat(store, MEMBERS[1], rank=0)
    fail(tmp_path, 1, 5.0, "broken")
    with pytest.raises(RankError, match=r"rank 0 \(cpu@0.4 on .*failed: ValueError: broken") as caught:
        watch(store, tmp_path, 0, 1)
    assert "\n\nIts traceback:\nin broken" in str(caught.value)


def test_the_first_error_that_is_not_about_a_lost_peer_is_the_cause(store: Any, tmp_path: Path) -> None:
    fail(tmp_path, 0, 4.0, "Connection closed by peer")
    fail(tmp_path, 1, 5.0, "own")
    with pytest.raises(RankError, match=r"rank 1 .*own"):
        watch(store, tmp_path, 1, 1)


def test_a_wrong_input_stays_one(store: Any, tmp_path: Path) -> None:
    fail(tmp_path, 0, 4.0, "batch_size=0", kind="input")
    with pytest.raises(InputError, match=r"rank 0 \(cpu on .*: batch_size=0"):
        watch(store, tmp_path, 1, 0)


def test_a_killed_process_is_the_cause_whatever_the_others_report(store: Any, tmp_path: Path) -> None:
    fail(tmp_path, 0, 4.0, "own")
    with pytest.raises(RankError, match=r"rank 1 .*SIGKILL"):
        watch(store, tmp_path, 1, -9)


def test_what_a_rank_said_last_is_shown_though_another_has_failed_before_it(store: Any, tmp_path: Path) -> None:
    """On a busy machine rank 0 may end, and tell which steps were skipped, after rank 1 has failed."""

    def beat_with(count: int, **more: Any) -> None:
        status = {"count": count, "member": MEMBERS[0], "rank": 0, "slot": 3, "phase": "compute", "min_ranks": 1}
        store.set(heartbeat_key(MEMBERS[0]), json.dumps(status | more))

    class EndsLater(FakeProcesses):
        looks = 0

        def exit_codes(self) -> list[int | None]:
            self.looks += 1
            if self.looks == 1:
                return [None, 1]
            beat_with(2, notes=["slot 3: skipped"])
            fail(tmp_path, 0, 6.0, "own", kind="not finite")
            return [1, 1]

    class Shown(Reporter):
        notes: Any = None

        def ranks(self, statuses: Any, first: int = 0) -> None:
            self.notes = statuses[0].get("notes")

    beat_with(1)
    fail(tmp_path, 1, 5.0, "own", kind="not finite")
    reporter = Shown("off")
    processes: Any = EndsLater()
    with pytest.raises(RankError, match="own"):
        Watch(processes, store, tmp_path, Generations(ROSTER, MEMBERS), reporter).wait(Requests())
    assert reporter.notes == ["slot 3: skipped"]


def test_a_steps_length_is_measured_between_slots_and_not_in_phases_that_may_last() -> None:
    (device,) = parse_devices("cpu")
    rank = RankHealth("host/cpu/aa", device, 0.0, 0.0)
    rank.update({"count": 1, "slot": 0, "phase": "setup"}, 50.0)
    assert (rank.heard_s, rank.moved_s, rank.longest_step_s) == (50.0, 50.0, 0.0)
    rank.update({"count": 2, "slot": 0, "phase": "compute"}, 51.0)
    rank.update({"count": 3, "slot": 4, "phase": "compute"}, 54.0)
    assert (rank.moved_s, rank.longest_step_s) == (54.0, 1.0)
    rank.update({"count": 3, "slot": 4, "phase": "compute"}, 60.0)  # no new heartbeat
    assert rank.heard_s == 54.0
