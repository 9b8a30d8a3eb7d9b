"""The watch over ranks that can go on without each other: made-up processes and heartbeats, and a real store."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from uneven import InputError
from uneven.comm.store import open_store
from uneven.errors import RankError
from uneven.hardware.device import parse_devices
from uneven.hardware.roster import Roster
from uneven.launch import watch as watch_module
from uneven.launch.generations import MOST_REPEATS
from uneven.launch.heartbeat import (
    GENERATION_KEY,
    heartbeat_key,
    ready_key,
    roster_key,
    settled_key,
    suspicion_key,
)
from uneven.launch.local_ranks import Newcomer
from uneven.launch.requests import Requests
from uneven.launch.training import RESULT
from uneven.launch.watch import Watch
from uneven.results.progress import Reporter
from uneven.train.membership import Generation

MEMBERS = ("pc/cpu/a", "pc/cpu/b", "mini/cpu/c")
ROSTER = Roster(parse_devices("cpu,cpu,cpu@0.4"), (0, 0, 1), ("pc", "mini"))


class Lines(Reporter):
    """Keeps what the user would read."""

    def __init__(self) -> None:
        super().__init__("lines")
        self.lines: list[str] = []

    def say(self, lines: Any) -> None:
        self.lines += lines


class Cluster:
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
        self.reporter = Lines()
        clock = SimpleNamespace(monotonic=lambda: self.looks / 10, sleep=lambda _: None)
        monkeypatch.setattr(watch_module, "time", clock)
        monkeypatch.setattr(watch_module, "GRACE_S", 0.0)

    codes: list[Any]

    def exit_codes(self) -> list[Any]:
        """The watch begins every look with it."""
        return list(self.codes)

    def lost(self) -> dict[int, str]:
        return self.gone

    def give_up(self, number: int) -> None:
        self.given_up.append(number)

    def watch(self, looks: int = 5) -> None:
        """So many looks, and then all ranks that run have ended well."""
        recruits = self if isinstance(self, Recruiting) else None
        watch = Watch(self, self.store, self.folder, MEMBERS, ROSTER, self.reporter, recruits)
        requests = Requests()
        for self.looks in range(1, looks + 1):
            self.at.get(self.looks, lambda: None)()
            for number, member in enumerate(self.members):
                if number not in self.silent and self.codes[number] is None:
                    status = {"count": self.looks, "member": member, "rank": number, **self.statuses[number]}
                    self.store.set(heartbeat_key(member), json.dumps(status))
            assert not watch._look(requests)
        self.looks += 1
        self.codes = [0 if code is None and n not in self.stays else code for n, code in enumerate(self.codes)]
        assert watch._look(requests)

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


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(tmp_path, monkeypatch)


def test_a_killed_rank_leaves_the_roster_and_its_exit_code_does_not_fail_the_run(cluster: Cluster) -> None:
    cluster.at[2] = cluster.end(1, -9)
    cluster.watch()
    found = cluster.generation
    assert found is not None
    assert (found.number, found.members, found.roster.machines) == (1, (MEMBERS[0], MEMBERS[2]), (0, 1))
    assert cluster.reporter.lines == [found.why]
    assert found.why == (
        "rank 1 (cpu on pc) was ended by SIGKILL: 2 ranks go on, its samples since the last step are trained again"
    )


def test_a_rank_that_raises_leaves_too_and_ranks_lost_one_after_the_other_make_generations(cluster: Cluster) -> None:
    cluster.statuses = [{**status, "rounds": {"round": 1}} for status in cluster.statuses]
    cluster.at[2] = cluster.end(0, 1, what="OutOfMemoryError: CUDA out of memory", place="train.py:7 in step")
    cluster.at[3] = cluster.end(2, -11)
    cluster.watch()
    assert cluster.generation is not None
    assert (cluster.generation.number, cluster.generation.members) == (2, (MEMBERS[1],))
    first, second = cluster.reporter.lines
    assert first.startswith("rank 0 (cpu on pc) failed: OutOfMemoryError: CUDA out of memory at train.py:7 in step: 2 ")
    assert second.endswith("SIGSEGV: 1 rank goes on, its samples since the last round are trained again")


def test_a_silent_rank_is_given_up_and_ended_and_a_healthy_one_that_was_silent_for_a_while_is_not(
    cluster: Cluster,
) -> None:
    cluster.at[2] = lambda: cluster.silent.update({1, 2})
    cluster.at[110] = lambda: cluster.silent.discard(1)  # for almost 11 s
    cluster.watch(170)
    assert cluster.generation is not None
    assert cluster.generation.members == MEMBERS[:2]
    assert cluster.given_up == [2]
    assert "rank 2 (cpu@0.4 on mini) fell silent 15 s ago" in cluster.reporter.lines[0]


def test_a_deadline_counts_for_silence_too_and_a_watch_that_was_held_up_blames_nobody(cluster: Cluster) -> None:
    cluster.statuses = [{**status, "deadline": 2.0} for status in cluster.statuses]
    cluster.at[2] = lambda: cluster.silent.update({0, 1, 2})
    cluster.at[3] = lambda: setattr(cluster, "looks", 203)  # this process was stopped for 20 s
    cluster.watch(10)
    assert cluster.generation is None
    cluster.at = {2: lambda: cluster.silent.update({2})}
    cluster.codes, cluster.silent = [None, None, None], set()
    cluster.watch(30)
    assert cluster.given_up == [2]


def test_a_machine_that_is_lost_takes_its_ranks_with_it(cluster: Cluster) -> None:
    cluster.at[2] = lambda: cluster.gone.update({2: "mini (10.0.0.2) is lost with rank 2: nothing was heard for 5 s"})
    cluster.at[4] = cluster.end(2, -9)
    cluster.watch()
    assert cluster.generation is not None
    assert (cluster.generation.number, cluster.generation.roster.hosts) == (1, ("pc",))
    assert cluster.reporter.lines == [cluster.generation.why]
    assert cluster.generation.why.startswith("mini (10.0.0.2) is lost with rank 2: nothing was heard for 5 s: 2 ranks")


@pytest.mark.parametrize(
    ("lost", "changes", "error", "words"),
    [
        ([1], {"min_ranks": 3}, RankError, r"rank 1 .*SIGKILL; 2 ranks are left, and min_ranks=3"),
        ([0, 1], {}, RankError, r"SIGKILL; no rank is left on pc, which leads the run"),
        ([0, 1, 2], {}, RankError, r"SIGKILL; no rank is left$"),
    ],
)
def test_too_few_end_the_run_with_the_cause(
    cluster: Cluster, lost: list[int], changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    cluster.statuses = [{**status, **changes} for status in cluster.statuses]
    cluster.at[2] = lambda: [cluster.end(number, -9)() for number in lost]
    with pytest.raises(error, match=words):
        cluster.watch()
    assert cluster.generation is None


def test_a_rank_before_its_first_step_or_one_that_cannot_go_on_ends_the_run(cluster: Cluster) -> None:
    cluster.statuses[2] = {"slot": 0, "phase": "communication"}
    cluster.at[2] = cluster.end(1, -9)
    with pytest.raises(RankError, match=r"rank 1 \(cpu on pc\) was ended by SIGKILL$"):
        cluster.watch()


def test_what_all_ranks_would_raise_ends_the_run(cluster: Cluster) -> None:
    cluster.at[2] = cluster.end(1, 1, what="InputError: epochs=0", message="epochs=0", kind="input")
    with pytest.raises(InputError, match=r"rank 1 \(cpu on pc\): epochs=0"):
        cluster.watch()
    assert cluster.generation is None


def test_the_same_error_at_the_same_slot_twice_ends_the_run_with_its_traceback(cluster: Cluster) -> None:
    error = {"what": "ValueError: bad sample", "place": "train.py:7 in step"}
    cluster.at[2] = cluster.end(1, 1, **error)
    cluster.at[4] = cluster.end(2, 1, **error)
    with pytest.raises(RankError, match=r"rank 2 .*failed: ValueError: bad sample\n  at train.py:7 in step") as caught:
        cluster.watch()
    assert f"Traceback of {MEMBERS[2]}:\nin step" in str(caught.value)


def test_a_broken_connection_alone_makes_a_new_generation_of_all(cluster: Cluster) -> None:
    cluster.at[2] = lambda: cluster.suspect(0, 0)
    cluster.watch(30)
    assert cluster.generation is not None
    assert (cluster.generation.number, cluster.generation.members) == (1, MEMBERS)
    assert cluster.reporter.lines == ["connection reset: all ranks start a new group"]


def test_a_connection_that_breaks_again_and_again_without_a_step_ends_the_run(cluster: Cluster) -> None:
    cluster.at = {look: lambda look=look: cluster.suspect(0, look // 20) for look in range(1, 200, 20)}  # type: ignore[misc]
    with pytest.raises(RankError, match=r"lost each other 6 times without a step .*connection reset"):
        cluster.watch(200)
    assert cluster.generation is not None
    assert cluster.generation.number == MOST_REPEATS


def test_a_suspicion_waits_for_the_silence_of_the_one_that_is_missed(cluster: Cluster) -> None:
    cluster.at[2] = lambda: (cluster.silent.add(2), cluster.suspect(0, 0))
    cluster.watch(170)
    assert cluster.generation is not None
    assert (cluster.generation.number, cluster.generation.members) == (1, MEMBERS[:2])


def test_a_rank_that_has_left_the_run_leaves_the_roster_where_another_still_needs_one(cluster: Cluster) -> None:
    def leave() -> None:
        cluster.statuses[0] = {"slot": 9, "phase": "setup"}
        cluster.suspect(1, 0)

    cluster.at[2] = leave
    cluster.watch(30)
    assert cluster.generation is not None
    assert cluster.generation.members == MEMBERS[1:]
    assert cluster.reporter.lines == ["rank 0 (cpu on pc) had finished already: 2 ranks go on"]


def test_a_rank_lost_after_the_result_was_written_fails_nothing_and_is_not_waited_for(cluster: Cluster) -> None:
    (cluster.folder / RESULT).write_text("result-0")
    cluster.statuses = [{"slot": 9, "phase": "setup"} for _ in MEMBERS]
    cluster.at[2] = cluster.end(2, -9)
    cluster.watch()
    assert cluster.generation is None


def test_lines_and_history_come_from_whoever_is_rank_0(cluster: Cluster) -> None:
    known = {"notes": ["said by all"], "epochs": 2, "history": []}
    cluster.statuses = [{**status, **known} for status in cluster.statuses]
    cluster.at[2] = cluster.end(0, -9)
    cluster.at[3] = lambda: cluster.statuses[1].update(notes=["said by all", "said by the new one"])
    cluster.watch()
    assert [line for line in cluster.reporter.lines if "SIGKILL" not in line] == ["said by all", "said by the new one"]


class Recruiting(Cluster):
    """A cluster that a machine joins at a look, and whose first machine can start ranks again."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(folder, monkeypatch)
        self.statuses = [{**status, "admits": True, "restarts": 1} for status in self.statuses]
        self.coming: list[Newcomer] = []
        self.turned_away: dict[int, str] = {}

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


@pytest.fixture
def recruiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recruiting:
    return Recruiting(tmp_path, monkeypatch)


LAPTOP = [Newcomer(f"laptop/cpu/{one}", parse_devices("cpu")[0], "laptop") for one in "xy"]


def test_the_ranks_of_a_machine_join_together_when_all_of_them_are_ready(recruiting: Recruiting) -> None:
    recruiting.at = {2: lambda: recruiting.coming.extend(LAPTOP), 4: recruiting.ready(3), 6: recruiting.ready(4)}
    recruiting.at[5] = lambda: cannot_be_seen(recruiting)
    recruiting.watch(10)
    assert recruiting.reporter.lines == ["rank 3 (cpu on laptop), rank 4 (cpu on laptop) join: 5 ranks go on"]
    assert recruiting.generation is not None
    assert recruiting.generation.members == (*MEMBERS, "laptop/cpu/x", "laptop/cpu/y")
    assert recruiting.generation.roster.hosts == ("pc", "mini", "laptop")


def cannot_be_seen(cluster: Cluster) -> None:
    assert cluster.generation is None


def test_who_fails_before_it_has_joined_costs_one_line_and_its_machine_is_told(recruiting: Recruiting) -> None:
    recruiting.at = {2: lambda: recruiting.coming.extend(LAPTOP), 4: recruiting.ready(4)}
    recruiting.at[6] = recruiting.end(3, 1, what="RefusedError: laptop: other data", kind="refused", member="laptop")
    recruiting.watch(10)
    first, second = recruiting.reporter.lines
    assert first == ("cpu on laptop has not joined: RefusedError: laptop: other data; the run goes on without it")
    assert second == "rank 3 (cpu on laptop) joins: 4 ranks go on"
    assert recruiting.turned_away == {3: "RefusedError: laptop: other data"}


def test_nobody_joins_a_run_that_does_not_admit_it_or_is_asked_to_stop(recruiting: Recruiting) -> None:
    recruiting.statuses[1]["admits"] = False
    recruiting.at = {2: lambda: recruiting.coming.extend(LAPTOP), 3: recruiting.ready(3, 4)}
    recruiting.watch(8)
    assert recruiting.generation is None
    assert recruiting.reporter.lines == []


def test_a_lost_rank_of_this_machine_is_started_again_as_often_as_the_setting_says(recruiting: Recruiting) -> None:
    recruiting.at = {
        2: recruiting.end(2, -9),
        4: recruiting.end(1, -9),
        6: recruiting.ready(3),
        8: recruiting.settle(3),
    }
    recruiting.at[10] = recruiting.end(3, -9)
    recruiting.watch(14)
    gone, lost, again, joins, last = recruiting.reporter.lines
    assert "rank 2 (cpu@0.4 on mini) was ended by SIGKILL: 2 ranks go on" in gone
    assert "rank 1 (cpu on pc) was ended by SIGKILL: 1 rank goes on" in lost
    assert again == "a rank on cpu is started again, and joins when it is ready (restart 1 of 1)"
    assert joins == "rank 1 (cpu on pc) joins: 2 ranks go on"
    assert "1 rank goes on" in last
    assert recruiting.generation is not None
    assert (recruiting.generation.number, recruiting.generation.members) == (4, MEMBERS[:1])


def test_a_machine_that_the_others_do_not_reach_is_left_out_again(recruiting: Recruiting) -> None:
    recruiting.at = {2: lambda: recruiting.coming.extend(LAPTOP[:1]), 4: recruiting.ready(3)}
    recruiting.at[6] = lambda: recruiting.suspect(0, 1, "no connection to laptop")
    recruiting.watch(30)
    assert recruiting.generation is not None
    assert (recruiting.generation.number, recruiting.generation.members) == (2, MEMBERS)
    assert recruiting.given_up == [3]
    assert "rank 3 (cpu on laptop) could not settle (no connection to laptop)" in recruiting.reporter.lines[-1]


def test_a_run_ends_without_those_who_have_not_joined_it(recruiting: Recruiting) -> None:
    recruiting.at = {2: lambda: recruiting.coming.extend(LAPTOP)}
    recruiting.stays = {3, 4}
    recruiting.watch(6)
    assert recruiting.codes == [0, 0, 0, None, None]
