"""Runs of a small net, whole or restarted."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from uneven import TensorData, TrainedState, fit

X = torch.randn(100, 6)


Y = (X.sum(1) > 0).long()


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))


def train_step(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def eval_step(model: nn.Module, batch: Any) -> tuple[dict[str, Any], int]:
    return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).sum()}, len(batch[1])


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def train(**changes: Any) -> TrainedState:
    settings: dict[str, Any] = {
        "model": make_net,
        "optimizer": momentum,
        "step": train_step,
        "dataset": TensorData(X, Y),
        "batch_size": 16,
        "epochs": 3,
        "devices": "cpu",
        "seed": 7,
        "progress": "off",
    }
    return fit(**{**settings, **changes})


SAMPLES = torch.randn(64, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1).double()


# Powers of two: a captured step holds its learning rate in fp32.
def make_optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1 / 16, momentum=0.9)


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch) - batch.sin().sum(1, keepdim=True)).square().mean()
