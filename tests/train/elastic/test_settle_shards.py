"""Ranks with shards are lost at every collective of a run: with redundancy=1 the others end as one process would."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from tests.train.clusters import Begun, FakeMembership, Loss, LossyGroup, fill, flat, on_lossy_threads
from tests.train.elastic.lossy_runs import ways
from tests.train.exact_runs import OPTIMIZERS, X, Y, mean_loss
from uneven.config import Task, resolve
from uneven.data.tensors import TensorData
from uneven.launch.requests import Requests
from uneven.launch.training import collect
from uneven.results.state import TrainedState
from uneven.train.rank_info import RankInfo
from uneven.train.worker import Worker

NAMES = ("zero1", "zero2", "fsdp")


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 9), nn.Linear(9, 3)])
        fill(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.blocks
        return second(torch.tanh(first(x)))  # type: ignore[no-any-return]


def train(size: int, losses: list[Loss], leaver: str = "", **changes: Any) -> tuple[dict[str, Any], Any]:
    settings = {"batch_size": 12, "epochs": 1, "seed": 3, "global_batch_size": 30, "max_grad_norm": 0.5} | changes
    config = resolve({**settings, "policy": "balanced" if size > 1 else "sync"})
    scheduler = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)  # noqa: E731
    task = Task(Blocks, OPTIMIZERS["adam"], mean_loss, TensorData(X.double(), Y), scheduler)

    def rank(info: RankInfo, group: LossyGroup, membership: FakeMembership) -> tuple[TrainedState, Worker]:
        worker = Worker(task, config, info, lambda _: group, Requests(), Begun(group))
        worker.membership = membership
        membership.is_asked = info.member == leaver  # from the first step on
        result = worker.train()
        return worker.finish(lambda: collect(worker.group, result, worker.axis)), worker

    return on_lossy_threads(size, losses, rank)


def train_sharded(name: str, size: int, *losses: Loss) -> tuple[dict[str, Any], Any]:
    shares = (3.0, 2.0, 1.0, 2.0)[:size]
    found, leader = train(size, list(losses), shares=shares, memory_shares=shares[::-1], strategy=name, redundancy=1)
    assert set(found) == {f"m{n}" for n in range(size)} - {loss.victim for loss in losses}, losses
    return found, leader


def places(name: str, size: int) -> list[int]:
    """The collectives of a run without a loss, from its first step on."""
    _, leader = train_sharded(name, size)
    return list(range(leader.begun, leader.collectives[0]))


def check(found: dict[str, Any], alone: TrainedState) -> None:
    for state, _ in found.values():
        torch.testing.assert_close(flat(state.params), flat(alone.params), rtol=0, atol=1e-10)
        for name, value in alone.optimizer.items():
            if not name.startswith("random."):
                torch.testing.assert_close(state.optimizer[name], value, rtol=0, atol=1e-10)
        assert state.finished
        assert state.samples == alone.samples
        for entry, right in zip(state.history, alone.history, strict=True):
            assert abs(entry["train_loss"] - right["train_loss"]) < 1e-10, (entry, right)


@pytest.fixture(scope="module")
def alone() -> TrainedState:
    ((state, _),) = train(1, [])[0].values()
    return state


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
