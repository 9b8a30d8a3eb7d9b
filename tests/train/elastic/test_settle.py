"""Ranks are lost at every collective of a run: whoever is left ends with what one process would have trained.

On threads, with real workers; tests/faults has the same with processes that are really killed.
"""

import itertools
import math
from typing import Any

import pytest
import torch

from tests.train.clusters import Join, Loss, flat
from tests.train.elastic.lossy_runs import SHARES, check, train, ways
from tests.train.exact_runs import X
from uneven.results.state import TrainedState


def places(size: int) -> list[int]:
    """The collectives of a run without a loss, from its first step on."""
    _, leader = train(size, [], shares=SHARES[:size])
    assert leader.collectives[0] - leader.begun > 25
    return list(range(leader.begun, leader.collectives[0]))


def lose(size: int, *losses: Loss) -> dict[str, Any]:
    found, _ = train(size, list(losses), shares=SHARES[:size])
    assert set(found) == {f"m{n}" for n in range(size)} - {loss.victim for loss in losses}, losses
    return found


def test_a_rank_is_lost_at_some_collective(alone: TrainedState) -> None:
    cases = list(itertools.product(places(3), ways(("m0", "m2"))))
    for place, (after, blind) in cases[::23]:
        check(lose(3, Loss("m1", place, after=after, blind=blind)), alone)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", ["m0", "m1", "m2"])
def test_any_rank_is_lost_at_any_collective(victim: str, alone: TrainedState) -> None:
    left = tuple(name for name in ("m0", "m1", "m2") if name != victim)
    for place, (after, blind) in itertools.product(places(3), ways(left)):
        check(lose(3, Loss(victim, place, after=after, blind=blind)), alone)


@pytest.mark.parametrize("blind", [frozenset({"m0"}), frozenset({"m2"})])
def test_a_rank_that_missed_the_verdict_of_a_skipped_step_skips_it_too(blind: frozenset[str]) -> None:
    """It took the params over, and counted the samples as trained."""
    x = X.clone()
    x[17] = math.nan
    ((one, _),) = train(1, [], policy="sync", x=x)[0].values()
    assert one.dropped
    for place in places(3)[:20]:
        found, _ = train(3, [Loss("m1", place, after=True, blind=blind)], shares=SHARES[:3], x=x)
        for state, _ in found.values():
            assert state.samples == one.samples, place
            assert {part[0] for part in state.dropped} == {part[0] for part in one.dropped}, place
            torch.testing.assert_close(flat(state.params), flat(one.params), rtol=0, atol=1e-12)


def second_losses(size: int, first: Loss) -> list[int]:
    """The collectives of generation 1, settling included, after the first loss."""
    _, leader = train(size, [first], shares=SHARES[:size])
    return list(range(leader.collectives[1]))


@pytest.mark.parametrize("step", [pytest.param(19, id="some"), pytest.param(1, id="all", marks=pytest.mark.soak)])
@pytest.mark.timeout(900)
def test_another_rank_is_lost_while_the_others_settle_or_later(step: int, alone: TrainedState) -> None:
    """The first loss inside a step that one of those who are left has applied: the worst moment."""
    begin = places(4)[7]
    first = Loss("m1", begin, after=True, blind=frozenset({"m3"}))
    cases = list(itertools.product(second_losses(4, first), ways(("m0", "m3"))))
    for place, (after, blind) in cases[::step]:
        check(lose(4, first, Loss("m2", place, 1, after, blind)), alone)


def test_one_rank_is_left(alone: TrainedState) -> None:
    begin = places(2)
    for place in (begin[3], begin[-1]):
        check(lose(2, Loss("m0", place)), alone)


@pytest.mark.parametrize("step", [pytest.param(5, id="some"), pytest.param(1, id="all", marks=pytest.mark.soak)])
@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", [2, 3])
def test_a_newcomer_joins_at_some_collective(size: int, step: int, alone: TrainedState) -> None:
    """It gets params, optimizer state, buffers, schedule and history; the global batch stays."""
    _, leader = train(size, [], policy="sync")
    for place in range(leader.begun, leader.collectives[0] - 6, step):
        found, leader = train(size, [], policy="sync", joins=[Join("new", place)])
        assert set(found) == {*(f"m{n}" for n in range(size)), "new"}
        assert len(leader.generations) == 2
        check(found, alone)


@pytest.mark.parametrize("size", [2, 3])
def test_a_newcomer_joins_when_all_is_trained(size: int, alone: TrainedState) -> None:
    """The launcher admits it by heartbeats from before the end: it waited for steps while the others gave results."""
    _, leader = train(size, [], policy="sync")
    for place in range(leader.collectives[0] - 6, leader.collectives[0]):
        found, leader = train(size, [], policy="sync", joins=[Join("new", place)])
        assert set(found) == {*(f"m{n}" for n in range(size)), "new"}
        check(found, alone)


@pytest.mark.parametrize("step", [pytest.param(23, id="some"), pytest.param(1, id="all", marks=pytest.mark.soak)])
@pytest.mark.timeout(900)
def test_a_rank_is_lost_while_a_newcomer_joins(step: int, alone: TrainedState) -> None:
    _, leader = train(3, [], policy="sync")
    join = Join("new", leader.begun + 7)
    _, leader = train(3, [], policy="sync", joins=[join])
    for place in range(0, leader.collectives[1] - 6, step):
        for victim in ("m0", "new"):
            found, _ = train(3, [Loss(victim, place, 1)], policy="sync", joins=[join])
            assert set(found) == {"m0", "m1", "m2", "new"} - {victim}
            check(found, alone)
