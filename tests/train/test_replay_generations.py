"""Runs in which ranks were lost or joined are replayed from their log, bit by bit: on threads, in all four policies.

The model has BatchNorm, whose buffers each rank has for itself between averages, and Adam, whose state each rank of a
local policy has for itself. Random numbers are one generator for all threads: tests/launch/test_replay_processes.py.
"""

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.train.clusters import Begun, FakeMembership, Join, Loss, LossyGroup, on_lossy_threads
from tests.train.elastic.test_settle import NormNet, accuracy, ways
from tests.train.replays import assert_same_bits, replay_on_threads
from tests.train.test_gradient_sync import OPTIMIZERS, X, Y, mean_loss
from uneven.config import Evaluation, RunConfig, Task, resolve
from uneven.data.tensors import TensorData
from uneven.launch.training import collect
from uneven.policy.finish import Cost
from uneven.results.state import TrainedState
from uneven.train.rank_info import RankInfo
from uneven.train.worker import Worker

POLICIES = ["sync", "balanced", "cadence", "async"]
EXACT = {"batch_size": 12, "global_batch_size": 30, "epochs": 2}
LOCAL = {"batch_size": 6, "epochs": 2, "anchor": 2, "max_anchor": 2}
DATA = TensorData(X.double(), Y)


@pytest.fixture(autouse=True)
def equal_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a rank may look so slow that there are too few rounds."""
    monkeypatch.setattr("uneven.train.worker.measure", lambda _: Cost(0.0, 1.0))


def settings(policy: str, **changes: Any) -> RunConfig:
    return resolve({"seed": 3, "policy": policy, **(EXACT if policy in ("sync", "balanced") else LOCAL), **changes})


def task() -> Task:
    return Task(NormNet, OPTIMIZERS["adam"], mean_loss, DATA, None, Evaluation(DATA, accuracy, every=1))


def train(policy: str, size: int, losses: Sequence[Loss] = (), joins: Sequence[Join] = ()) -> tuple[Any, Any]:
    def rank(info: RankInfo, group: LossyGroup, membership: FakeMembership) -> tuple[TrainedState, Worker]:
        worker = Worker(task(), settings(policy), info, lambda _: group, threading.Event(), Begun(group))
        worker.membership = membership
        result = worker.train()
        return worker.finish(lambda: collect(worker.group, result, worker.axis)), worker

    return on_lossy_threads(size, losses, rank, joins)


def check(folder: Path, policy: str, size: int, losses: Sequence[Loss] = (), joins: Sequence[Join] = ()) -> None:
    """From the log that the first one of those who are left has written."""
    generations = train_and_replay(folder, policy, size, losses, joins)
    assert generations == 1 + len(losses) + len(joins)


def train_and_replay(
    folder: Path, policy: str, size: int, losses: Sequence[Loss] = (), joins: Sequence[Join] = ()
) -> int:
    """Returns the number of generations: a loss may be planned for a collective that the run does not come to."""
    found, leader = train(policy, size, losses, joins)
    if len(leader.generations) == 1:
        return 1
    state, _ = next(iter(found.values()))
    state.save(folder)
    again = replay_on_threads(folder, task, settings(policy, replay=folder))
    assert_same_bits(again, found)
    repeated, _ = next(iter(again.values()))
    assert (repeated.log, repeated.rounds, repeated.members) == (state.log, state.rounds, state.members)
    for entry, same in zip(repeated.history, state.history, strict=True):
        assert entry["step"] == same["step"]
        # The losses of a round that came to nothing are added up in another order.
        assert entry["train_loss"] == pytest.approx(same["train_loss"], rel=1e-12, nan_ok=True)
    return len(leader.generations)


def lose_two(policy: str, place: int, folder: Path) -> int:
    """The second one at this collective of the second generation; returns the number of generations."""
    first = Loss("m1", places(policy, 4)[7], after=True, blind=frozenset({"m3"}))
    second = Loss("m0", place, 1, after=True, blind=frozenset({"m2"}))
    return train_and_replay(folder, policy, 4, [first, second])


def places(policy: str, size: int) -> range:
    """The collectives of a run without a loss, from its first step on."""
    _, leader = train(policy, size)
    return range(leader.begun, leader.collectives[0])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_rank_is_lost_and_another_joins(policy: str, tmp_path: Path) -> None:
    """The first with a sum that one of those who are left does not get."""
    loss = Loss("m1", places(policy, 3)[5], after=True, blind=frozenset({"m2"}))
    check(tmp_path / "run", policy, 3, [loss], [Join("new", 9, 1)])


@pytest.mark.parametrize("policy", POLICIES)
def test_another_is_lost_around_the_event_that_the_first_loss_interrupted(policy: str, tmp_path: Path) -> None:
    """A generation may end with that event, before anybody has trained a slot in it, or a lost one has."""
    for place in range(14, 20, 2):
        lose_two(policy, place, tmp_path / str(place))


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_rank_is_lost(policy: str, tmp_path: Path) -> None:
    """At any collective, before it or after it, with or without the result on each of those who are left.

    In the local policies the clock decides how many there are: some of the last ones may not come.
    """
    cases = list(itertools.product(("m1", "m0"), places(policy, 3), ways(("m2", "m0"))))[::3]
    lost = 0
    for number, (victim, place, (after, blind)) in enumerate(cases):
        left = frozenset({"m1" if name == victim else name for name in blind})
        loss = Loss(victim, place, after=after, blind=left)
        lost += train_and_replay(tmp_path / str(number), policy, 3, [loss]) - 1
    assert lost == len(cases) if policy in ("sync", "balanced") else lost > len(cases) // 2


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_newcomer_joins(policy: str, tmp_path: Path) -> None:
    for place in places(policy, 2)[:-6]:
        check(tmp_path / str(place), policy, 2, joins=[Join("new", place)])


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", POLICIES)
def test_one_is_left_alone_and_another_joins_it(policy: str, tmp_path: Path) -> None:
    for place in places(policy, 2)[1:12:2]:
        check(tmp_path / str(place), policy, 2, [Loss("m1", place)], [Join("new", place % 5, 1)])


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", POLICIES)
def test_another_is_lost_while_the_others_settle_or_later(policy: str, tmp_path: Path) -> None:
    """How many collectives are left after the first loss depends on the policy, and in the local ones on the clock."""
    for place in range(0, 40, 2):
        generations = lose_two(policy, place, tmp_path / str(place))
        if generations == 2:  # the run was over before
            break
        assert generations == 3
    assert place > 12  # it settles by then, and trains
