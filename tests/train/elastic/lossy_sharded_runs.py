"""Runs of sharded strategies on threads in which ranks are lost."""

from typing import Any

import torch
from torch import nn

from tests.train.clusters import Begun, FakeMembership, Loss, LossyGroup, fill, flat, on_lossy_threads
from tests.train.exact_runs import OPTIMIZERS, X, Y, mean_loss
from uneven.config import Task, resolve
from uneven.data.tensors import TensorData
from uneven.launch.training import collect
from uneven.results.state import TrainedState
from uneven.train.rank_info import RankInfo
from uneven.train.requests import Requests
from uneven.train.worker import Worker


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 9), nn.Linear(9, 3)])
        fill(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.blocks
        return second(torch.tanh(first(x)))  # type: ignore[no-any-return]


class Deep(nn.Module):
    """With two matrices for Muon, so that two ranks own one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 9), nn.Linear(9, 8), nn.Linear(8, 3)
        fill(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))  # type: ignore[no-any-return]


def train(size: int, losses: list[Loss], leaver: str = "", **changes: Any) -> tuple[dict[str, Any], Any]:
    settings = {"batch_size": 12, "epochs": 1, "seed": 3, "global_batch_size": 30, "max_grad_norm": 0.5} | changes
    config = resolve({**settings, "policy": "balanced" if size > 1 else "sync"})
    scheduler = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)  # noqa: E731
    task = Task(Blocks, OPTIMIZERS["adam"], mean_loss, TensorData(X.double(), Y), scheduler)

    def rank(info: RankInfo, group: LossyGroup, membership: FakeMembership) -> tuple[TrainedState, Worker]:
        worker = Worker(task, config, info, lambda _: group, Requests(), Begun(group))
        worker.use_membership(membership)
        membership.is_asked = info.member == leaver  # from the first step on
        result = worker.train()
        return worker.finish(lambda: collect(worker.group, result, worker.axis)), worker

    return on_lossy_threads(size, losses, rank)


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
