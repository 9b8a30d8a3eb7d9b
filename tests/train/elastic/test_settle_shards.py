"""Ranks with shards are lost at every collective of a run: with redundancy=1 the others end as one process would."""

import itertools
from typing import Any

import pytest

from tests.train.clusters import Loss
from tests.train.elastic.lossy_runs import ways
from tests.train.elastic.lossy_sharded_runs import check, train
from uneven.results.state import TrainedState

NAMES = ("zero1", "zero2", "fsdp")


@pytest.fixture(scope="module")
def alone() -> TrainedState:
    ((state, _),) = train(1, [])[0].values()
    return state


def train_sharded(name: str, size: int, *losses: Loss) -> tuple[dict[str, Any], Any]:
    shares = (3.0, 2.0, 1.0, 2.0)[:size]
    found, leader = train(size, list(losses), shares=shares, memory_shares=shares[::-1], strategy=name, redundancy=1)
    assert set(found) == {f"m{n}" for n in range(size)} - {loss.victim for loss in losses}, losses
    return found, leader


def places(name: str, size: int) -> list[int]:
    """The collectives of a run without a loss, from its first step on."""
    _, leader = train_sharded(name, size)
    return list(range(leader.begun, leader.collectives[0]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("step", [pytest.param(59, id="some"), pytest.param(1, id="all", marks=pytest.mark.soak)])
@pytest.mark.timeout(900)
def test_a_rank_is_lost_at_a_collective(name: str, step: int, alone: TrainedState) -> None:
    cases = list(itertools.product(places(name, 3), ways(("m0", "m2"))))
    for place, (after, blind) in cases[::step]:
        check(train_sharded(name, 3, Loss("m1", place, after=after, blind=blind))[0], alone)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("step", [pytest.param(131, id="some"), pytest.param(1, id="all", marks=pytest.mark.soak)])
@pytest.mark.timeout(900)
def test_another_one_is_lost_while_the_others_settle_or_later(name: str, step: int, alone: TrainedState) -> None:
    """One that keeps no copy of the first one's shard, nor has its own there: else it may be lost for good."""
    begin = places(name, 4)
    first = Loss("m1", begin[len(begin) // 2], after=True, blind=frozenset({"m3"}))
    _, leader = train_sharded(name, 4, first)
    for place, (after, blind) in list(itertools.product(range(leader.collectives[1]), ways(("m2", "m3"))))[::step]:
        check(train_sharded(name, 4, first, Loss("m0", place, 1, after, blind))[0], alone)


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_is_left(name: str, alone: TrainedState) -> None:
    begin = places(name, 2)
    check(train_sharded(name, 2, Loss("m0", begin[len(begin) // 2]))[0], alone)


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_leaves_and_its_shards_come_from_their_copies(name: str, alone: TrainedState) -> None:
    shares = (3.0, 2.0, 1.0)
    given = {"shares": shares, "memory_shares": shares[::-1], "strategy": name, "redundancy": 1}
    found, leader = train(3, [], leaver="m1", **given)
    check(found, alone)
    assert ({*found}, {*leader.left}) == ({"m0", "m2"}, {"m1"})
