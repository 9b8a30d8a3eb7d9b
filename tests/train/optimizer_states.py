"""Optimizers and their states."""

from typing import Any

import torch

from tests.launch.checks.saved_runs import step
from uneven import TensorData, TrainedState, fit

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))


DATA = TensorData(X, X.sum(1, keepdim=True))  # 5 slots an epoch


def train_saving(model: Any, optimizer: Any, **options: Any) -> TrainedState:
    given = {"batch_size": 8, "epochs": 2, "devices": "cpu", "progress": "off", "save_every": "3 steps", **options}
    return fit(model=model, optimizer=optimizer, step=step, dataset=DATA, **given)
