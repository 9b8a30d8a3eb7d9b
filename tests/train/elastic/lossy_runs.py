"""Runs of exact policies on threads in which ranks are lost, leave and join."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tests.train.clusters import Begun, FakeMembership, Join, Loss, LossyGroup, fill, flat, on_lossy_threads
from tests.train.exact_runs import OPTIMIZERS, X, Y, mean_loss
from uneven.config import Evaluation, Task, resolve
from uneven.data.tensors import TensorData
from uneven.launch.training import collect
from uneven.results.state import TrainedState
from uneven.train.rank_info import RankInfo
from uneven.train.requests import Requests
from uneven.train.worker import Worker


class NormNet(nn.Module):
    """With BatchNorm, whose buffers must not see the samples of a step twice.

    The layer before it has no bias: its gradient would be rounding alone, which Adam scales up to 1e-10 a step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 9, bias=False), nn.BatchNorm1d(9), nn.Linear(9, 3)
        fill(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.norm(self.first(x))))


def accuracy(model: nn.Module, batch: Any) -> tuple[dict[str, torch.Tensor], int]:
    return {"right": (model(batch[0]).argmax(1) == batch[1]).sum().double()}, len(batch[1])


def train(
    size: int,
    losses: list[Loss],
    optimizer: str = "adam",
    joins: list[Join] | None = None,
    x: torch.Tensor = X,
    leaves: dict[str, int] | None = None,
    evaluate: Any = accuracy,
    callbacks: Callable[[], tuple[Any, ...]] = tuple,
    **changes: Any,
) -> tuple[dict[str, Any], Any]:
    """`leaves`: members that are asked to leave after so many steps. `callbacks` makes those of one member."""
    settings = {"batch_size": 12, "epochs": 2, "seed": 3, "global_batch_size": 30, "policy": "balanced"} | changes
    config = resolve({**settings, "sync_batchnorm": True})
    data = TensorData(x.double(), Y)
    shared = Task(NormNet, OPTIMIZERS[optimizer], mean_loss, data, None, Evaluation(data, evaluate, every=1))

    def rank(info: RankInfo, group: LossyGroup, membership: FakeMembership) -> tuple[TrainedState, Worker]:
        task = replace(shared, callbacks=callbacks())
        worker = Worker(task, config, info, lambda _: group, Requests(), Begun(group))
        worker.use_membership(membership)
        train_part = worker.train_part

        def watched(*arguments: Any) -> bool:
            membership.is_asked |= worker.engine.state.trained == (leaves or {}).get(info.member or "")
            return train_part(*arguments)

        worker.train_part = watched  # type: ignore[method-assign]
        result = worker.train()
        return worker.finish(lambda: collect(worker.group, result, worker.axis)), worker

    return on_lossy_threads(size, losses, rank, joins or [])


def check(found: dict[str, Any], alone: TrainedState) -> None:
    """All who are left hold the same bits, those of one process up to rounding; collect() has counted the samples."""
    states = [state for state, _ in found.values()]
    for state in states:
        assert torch.equal(flat({**state.params, **state.buffers}), flat({**states[0].params, **states[0].buffers}))
        torch.testing.assert_close(flat(state.params), flat(alone.params), rtol=0, atol=1e-12)
        torch.testing.assert_close(flat(state.buffers), flat(alone.buffers), rtol=0, atol=1e-12)
        assert state.finished
        assert state.samples == alone.samples
        assert [entry["right"] for entry in state.history] == [entry["right"] for entry in alone.history]
        for entry, right in zip(state.history, alone.history, strict=True):
            assert abs(entry["train_loss"] - right["train_loss"]) < 1e-10, (entry, right)


SHARES = (3.0, 2.0, 1.0, 2.0)


NOBODY: frozenset[str] = frozenset()


def ways(left: tuple[str, ...]) -> list[tuple[bool, frozenset[str]]]:
    """How a rank can be lost at a collective: before it, or after it with the result seen by all, some or none."""
    seen = [frozenset(names) for many in range(len(left) + 1) for names in itertools.combinations(left, many)]
    return [(False, NOBODY), *((True, blind) for blind in seen)]
