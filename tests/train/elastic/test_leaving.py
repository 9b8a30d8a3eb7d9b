"""Ranks that leave on purpose: what they trained stays, nothing is trained again, and the others go on.

On threads, with real workers. The recount of tests/train/elastic/test_settle_local.py finds out a ledger that lies.
"""

import itertools
from typing import Any

import pytest
import torch

from tests.train.clusters import Join, Loss, flat
from tests.train.elastic import lossy_local_runs as local
from tests.train.elastic import lossy_runs as exact
from uneven.results.state import TrainedState

pytestmark = pytest.mark.usefixtures("equal_speeds")


def segments(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Of the generations after the first, as the first of those who stay tells them."""
    _, worker = next(iter(found.values()))
    return list(worker.engine.state.segments[1:])


@pytest.mark.parametrize("policy", ["cadence", "async"])
@pytest.mark.parametrize("leaver", ["m2", pytest.param("m0", marks=pytest.mark.soak)])
def test_a_rank_leaves_after_a_round_with_all_that_it_trained(policy: str, leaver: str) -> None:
    samples = 0
    for step in (1, 4) if leaver == "m2" else range(9):
        found, leader = local.train(3, [], leaves={leaver: step}, policy=policy, is_evaluated=True)
        local.check(found, is_evaluated=True)
        if leaver in found:
            continue  # on a busy machine it may have fewer steps
        (segment,) = segments(found)
        assert (len(found), segment["again_samples"], segment["again"]) == (2, 0, [])
        _, worker = next(iter(found.values()))
        (log,) = [one for one in worker.engine.state.lost_logs if one["log"]] or [{"log": []}]
        assert sum(part[2] for part in log["log"]) == leader.left[leaver], "its log counts in the result"
        samples += leader.left[leaver]
    assert samples > 0


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_one_after_the_other_leaves_until_one_is_alone(policy: str) -> None:
    found, leader = local.train(3, [], leaves={"m0": 1, "m1": 3}, policy=policy, epochs=2)
    local.check(found, epochs=2)
    assert all(one.get("again_samples", 0) == 0 for one in segments(found))
    assert {*leader.left} | {*found} == {"m0", "m1", "m2"}


@pytest.mark.parametrize("policy", ["async", pytest.param("cadence", marks=pytest.mark.soak)])
def test_one_leaves_and_one_is_lost(policy: str) -> None:
    """Whichever comes first: exactly once, and a rank that nobody has let go settles with the others."""
    begun, _ = local.undisturbed(3, policy, 2, is_evaluated=False)
    for place in (3,) if policy == "async" else range(1, 12):
        found, _ = local.train(3, [Loss("m1", begun + place)], leaves={"m2": 2}, policy=policy, epochs=2)
        local.check(found, epochs=2)
        assert "m0" in found


def test_one_leaves_and_another_joins_the_one_that_stayed(alone: TrainedState) -> None:
    found, leader = exact.train(2, [], leaves={"m1": 2}, joins=[Join("new", 4, 1)])
    exact.check(found, alone)
    assert ({*found}, {*leader.left}) == ({"m0", "new"}, {"m1"})


@pytest.mark.parametrize("leaver", ["m0", pytest.param("m2", marks=pytest.mark.soak)])
def test_a_rank_leaves_between_two_steps(leaver: str, alone: TrainedState) -> None:
    """Also with the step before an evaluation, and with the last one."""
    for step in (0, 2, 5):
        found, leader = exact.train(3, [], shares=exact.SHARES[:3], leaves={leaver: step})
        exact.check(found, alone)
        assert {*found, *leader.left} == {"m0", "m1", "m2"}
        assert {*leader.left} == {leaver}


def test_steps_are_done_once_where_a_rank_leaves(alone: TrainedState) -> None:
    """Nobody is in the middle of a sum: no step is begun twice."""
    found, leader = exact.train(3, [], policy="sync", leaves={"m1": 0})
    exact.check(found, alone)
    assert leader.causes == ["a rank leaves"] * 2
    for state, worker in found.values():
        assert (slots := [slot for slot, _, _ in worker.engine.state.log]) == sorted(set(slots))
        (lost,) = worker.engine.state.lost_logs
        assert leader.left["m1"] == sum(samples for _, _, samples in lost["log"]) > 0
        losses = [(a["train_loss"], b["train_loss"]) for a, b in zip(state.history, alone.history, strict=True)]
        assert all(mine == pytest.approx(theirs, rel=1e-10) for mine, theirs in losses), losses
    assert len({flat(state.params).sum().item() for state, _ in found.values()}) == 1


def test_all_who_are_asked_leave_with_the_same_step(alone: TrainedState) -> None:
    found, leader = exact.train(4, [], shares=exact.SHARES, leaves={"m1": 3, "m3": 3})
    exact.check(found, alone)
    assert [generation.members for generation in leader.generations] == [("m0", "m1", "m2", "m3"), ("m0", "m2")]
    for first, second in itertools.pairwise(found.values()):
        assert torch.equal(flat(first[0].params), flat(second[0].params))
