"""Trained by test_join_saves.py on two machines, and by that test alone; argv: folder of the run, seconds a step."""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from uneven import TensorData, TrainedState, fit

BATCH, RANKS = 4, 2


def make() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def train(out: Path | None, pause_s: float = 0.0, **settings: Any) -> TrainedState:
    generator = torch.Generator().manual_seed(2)
    data = TensorData(torch.randn(160, 4, generator=generator).double(), torch.randn(160, 1, generator=generator))

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(pause_s)
        return (model(batch[0]) - batch[1]).square().mean()

    return fit(model=make, optimizer=adam, step=step, dataset=data, out=out, epochs=3, seed=5, **settings)


if __name__ == "__main__":
    options = {"batch_size": BATCH, "save_every": "5 steps", "keep_last": 2, "resume": "auto", "progress": "lines"}
    train(Path(sys.argv[1]), float(sys.argv[2]), **options)
