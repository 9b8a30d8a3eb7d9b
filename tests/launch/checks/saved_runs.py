"""Runs with checkpoints, for the checks of resuming."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from uneven import TensorData, TrainedState, fit

X, Y = torch.randn(40, 4), torch.randn(40, 1)  # 5 slots an epoch


def make() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, 1)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def train(model: Callable[[], nn.Module] = make, samples: int = 40, **changes: Any) -> TrainedState:
    options = {"batch_size": 8, "epochs": 2, "seed": 5, "devices": "cpu", "progress": "lines", **changes}
    data = TensorData(X[:samples], Y[:samples])
    return fit(model=model, optimizer=adam, step=step, dataset=data, **options)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_equal(found: TrainedState, folder: Path) -> None:
    wanted = TrainedState.load(folder)
    assert (found.slot, found.finished, found.samples) == (wanted.slot, True, wanted.samples)
    for name, value in wanted.params.items():
        assert torch.equal(found.params[name], value), name
