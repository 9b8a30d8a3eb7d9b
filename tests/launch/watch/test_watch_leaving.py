"""The watch over ranks that leave on purpose: made-up processes and heartbeats, and a real store."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launch.watch.cluster import LAPTOP, MEMBERS, Cluster, Recruiting
from uneven.launch.control.leave_requests import ENDS, Answer, LeaveRequest
from uneven.launch.heartbeat import LEAVE, SIGNAL_KEY, STAY, handed_key, leave_key
from uneven.train.rank_info import PARTING
from uneven.train.requests import Requests


class Parting(Recruiting):
    """Ranks that are asked to leave, and do as they are told, at chosen looks."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(folder, monkeypatch)
        self.answers: list[Answer] = []
        self.is_withdrawn = False

    def ask(self, *home: int, **about: Any) -> Callable[[], None]:
        is_open = lambda: not self.is_withdrawn  # noqa: E731
        return lambda: self.requested.append(LeaveRequest(home, self.answers.append, is_open=is_open, **about))

    def told(self, number: int) -> str | None:
        key = leave_key(self.members[number])
        return self.store.get(key).decode() if self.store.check([key]) else None

    def part(self, *leavers: int, generation: int = 0) -> Callable[[], None]:
        """All ranks have come to the same step: those who leave have handed everything in."""

        def part() -> None:
            for number in range(3):
                if number in leavers:
                    assert self.told(number) == LEAVE
                    self.store.set(handed_key(generation, self.members[number]), str(1000 + number))
                else:
                    self.suspect(number, generation, PARTING)

        return part


@pytest.fixture
def parting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Parting:
    return Parting(tmp_path, monkeypatch)


def test_a_rank_that_has_handed_in_is_not_in_the_next_generation(parting: Parting) -> None:
    parting.at = {2: parting.ask(2), 4: parting.part(2), 6: parting.end(2, 0)}
    parting.watch(30)
    found = parting.generation
    assert found is not None
    assert (found.number, found.members, found.left) == (1, MEMBERS[:2], MEMBERS[2:])
    assert parting.reporter.lines == [found.why] == ["rank 2 (cpu@0.4 on mini) leaves: 2 ranks go on"]
    (answer,) = parting.answers
    assert answer == {"left": "rank 2 (cpu@0.4 on mini) has handed in 1,002 samples and left: 2 ranks go on"}
    assert parting.let_gone == {2: answer["left"]}
    assert parting.given_up == [], "it ends by itself, and is not started again"


def test_it_is_let_go_when_the_others_have_come_as_far_and_not_before(parting: Parting) -> None:
    """A round counts where a rank that stays has its average."""
    parting.at = {2: parting.ask(1, 2, ranks=(1,)), 4: lambda: parting.store.set(handed_key(0, MEMBERS[1]), "7")}
    parting.at[20] = lambda: nobody_has_gone(parting)
    parting.at[21] = lambda: parting.suspect(0, 0, PARTING)
    parting.watch(40)
    assert parting.generation is not None
    assert parting.generation.members == (MEMBERS[0], MEMBERS[2])


def nobody_has_gone(cluster: Cluster) -> None:
    assert cluster.generation is None


@pytest.mark.parametrize(
    ("about", "changes", "words"),
    [
        ({}, {"min_ranks": 3}, "2 ranks are left, and min_ranks=3"),
        ({"ranks": (0, 1)}, {}, "no rank is left on pc, which leads the run and has its files"),
        ({"ranks": (0, 1, 2)}, {}, "no rank is left"),
        ({"ranks": (3,)}, {}, "there is no rank 3: the run has ranks 0 to 2"),
        ({"ranks": (0,), "may_be_elsewhere": False}, {}, "rank 0 (cpu on pc) is not on this machine"),
        ({}, {"min_ranks": None, "ends_because": "it is a loop of your own"}, "it is a loop of your own"),
        ({}, {"min_ranks": None, "stays_because": "it has on_fault='end'"}, "it has on_fault='end'"),
        ({"is_urgent": True}, {"min_ranks": None}, "the run has not begun to train"),
    ],
)
def test_who_cannot_leave_is_told_why_and_stays(
    parting: Parting, about: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    known = {"may_be_elsewhere": True} | about
    for status in parting.statuses:
        status.update(changes)
        if changes.get("min_ranks", 1) is None:
            del status["min_ranks"]
    parting.at = {2: parting.ask(2, **known)}
    parting.watch(6)
    assert parting.answers == [{"refused": words}]
    assert [parting.told(number) for number in range(3)] == [None] * 3
    assert parting.generation is None


def test_a_request_that_is_withdrawn_leaves_all_as_it_is(parting: Parting) -> None:
    parting.at = {2: parting.ask(2), 4: lambda: setattr(parting, "is_withdrawn", True)}
    parting.watch(8)
    assert (parting.told(2), parting.answers, parting.generation) == (STAY, [], None)


def test_a_rank_stays_where_another_is_lost_in_the_same_moment_and_too_few_would_be_left(parting: Parting) -> None:
    for status in parting.statuses:
        status["min_ranks"] = 2
    parting.at = {2: parting.ask(2), 4: parting.end(1, -9)}
    parting.at[6] = lambda: [parting.store.set(handed_key(1, MEMBERS[2]), "5"), parting.suspect(0, 1, PARTING)]
    parting.watch(10)
    assert parting.answers == [{"refused": "1 rank is left, and min_ranks=2"}]
    assert parting.generation is not None
    assert (parting.generation.number, parting.generation.members) == (2, (MEMBERS[0], MEMBERS[2]))
    assert parting.told(2) == STAY


def test_who_has_not_joined_yet_leaves_without_a_generation(parting: Parting) -> None:
    parting.at = {2: lambda: parting.coming.extend(LAPTOP), 4: parting.ask(3, 4), 6: parting.ready(3, 4)}
    parting.at[5] = lambda: [parting.end(number, -9)() for number in (3, 4)]
    parting.watch(10)
    assert parting.given_up == [3, 4]
    assert parting.answers == [{"left": "cpu on laptop leaves before it has joined"}]
    assert (parting.generation, parting.reporter.lines) == (None, [])


@pytest.mark.parametrize("can", [True, False])
def test_a_sigterm_to_a_rank_of_another_machine_lets_it_leave_or_stops_the_run(
    parting: Parting, can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[bool] = []
    monkeypatch.setattr(Requests, "terminate", lambda _: stopped.append(True))
    if not can:
        for status in parting.statuses:
            status["min_ranks"] = 3
    parting.at = {2: lambda: parting.statuses[2].update(terminated=True)}
    if can:
        parting.at[4] = parting.part(2)
    parting.watch(8)
    assert stopped == ([] if can else [True])
    assert (parting.generation is not None) == can
    assert not parting.store.check([SIGNAL_KEY])


def test_ranks_that_part_when_the_run_is_stopped_form_their_group_again(parting: Parting) -> None:
    """They counted as parting for ever: no generation came for them, and the run failed with nothing saved."""
    for status in parting.statuses:
        status["handles_stop"] = True
    parting.at = {2: parting.ask(2), 4: lambda: [parting.suspect(number, 0, PARTING) for number in (0, 1)]}
    parting.at[5] = lambda: parting.requests.stop.set()
    parting.watch(30)
    assert (parting.answers, parting.told(2)) == ([{"refused": ENDS}], STAY)
    assert parting.generation is not None
    assert (parting.generation.number, parting.generation.members) == (1, MEMBERS)
