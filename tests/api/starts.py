"""The head of the scripts that tests of the entry points start, and how they start them."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.forked import run_forked

BIN = Path(sys.executable).parent
HEAD = """
import json, sys, torch
from pathlib import Path
from torch import nn
from torch.nn import functional as F
from uneven import Ddp, TensorData, fit

X = torch.randn(150, 6, generator=torch.Generator().manual_seed(0)).double()
Y = torch.arange(150) % 3

def net():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()

def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)

def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])
"""


def start(command: list[str | Path], cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return run_forked(command, cwd=cwd, **options)


def assert_close(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == reference.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, reference[name], rtol=1e-10, atol=1e-10)
