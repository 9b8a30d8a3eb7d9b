"""Runs of fit on a CUDA device, captured or not."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

from uneven import TensorData, TrainedState, fit

# A captured step holds its learning rate in fp32: powers of two are the same number in both forms.
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1 / 16),
    "momentum": lambda params: torch.optim.SGD(params, lr=1 / 16, momentum=0.9, weight_decay=1e-4),
    "adam": lambda params: torch.optim.Adam(params, lr=1 / 128),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1 / 128, amsgrad=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1 / 1024, momentum=0.9),
}


def make_data(dtype: torch.dtype = torch.float64) -> TensorData:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 10, generator=generator, dtype=dtype)
    return TensorData(x, (x[:, :4].sum(1) > 0).long(), transform=lambda rows, keys: (rows[0] * 2, rows[1]))


def train_step(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def train(
    compile: str, optimizer: str = "momentum", dtype: torch.dtype = torch.float64, **changes: Any
) -> TrainedState:
    settings: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2)).to(dtype),
        "optimizer": OPTIMIZERS[optimizer],
        "step": train_step,
        "dataset": make_data(dtype),
        "batch_size": 32,
        "epochs": 3,
        "devices": "cuda:0",
        "progress": "off",
        "scheduler": lambda opt: StepLR(opt, 9, gamma=0.5),
    }
    return fit(**{**settings, "compile": compile, **changes})


def assert_same(a: TrainedState, b: TrainedState, rtol: float, atol: float) -> None:
    for name, value in {**a.params, **a.buffers, **a.optimizer}.items():
        if not name.startswith("random"):
            other = {**b.params, **b.buffers, **b.optimizer}[name]
            torch.testing.assert_close(
                value, other, rtol=rtol, atol=atol, check_dtype=False, msg=lambda m, n=name: n + m
            )
