"""A device whose speed changes in the middle of a real run: shares follow, and the result is still exact."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from uneven import TensorData, fit
from uneven.config import Task, resolve
from uneven.hardware.device import parse_devices
from uneven.hardware.throttle import Throttle
from uneven.launch.launcher import train_on_ranks
from uneven.results.progress import Reporter
from uneven.train.requests import Requests

SPEEDS = {0: 0.4, 150: 0.8, 300: 0.2}  # of rank 1, from these slots on
BATCH = 128
generator = torch.Generator().manual_seed(0)
X = torch.randn(45 * 2 * BATCH, 256, dtype=torch.float64, generator=generator)
Y = torch.randint(0, 10, (len(X),), generator=generator)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10)).double()


def make_optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def train_changing(worker: Any, folder: Path) -> Any:
    """The program of a rank: train as ever, on a device that changes its speed at some slots."""
    del folder

    def become(joined: Any) -> None:
        step = joined.synchronizer.step

        def train(part: Any, micros: Any) -> Any:
            if joined.rank_info.rank == 1 and part.slot.index in SPEEDS:
                joined.engine.throttle = Throttle(SPEEDS[part.slot.index])
            return step(part, micros)

        joined.synchronizer.step = train

    worker.after_joining = become
    return worker.train()


def typical(shares: list[int]) -> int:
    """Of the second half of a stretch, when the change is long past."""
    late = sorted(shares[len(shares) // 2 :])
    return late[len(late) // 2]


@pytest.mark.soak
def test_soak_shares_follow_a_changing_device() -> None:
    config = resolve({"batch_size": BATCH, "epochs": 10, "devices": "cpu,cpu@0.4", "progress": "off"})
    task = Task(make_model, make_optimizer, step, TensorData(X, Y))
    devices = parse_devices(config.devices)
    state = train_on_ranks(task, config, devices, Requests(), Reporter("off"), train_changing)
    shares = [samples for _, _, samples in state.log[1]]
    ends = [*list(SPEEDS)[1:], len(shares)]
    stretches = [shares[start:end] for start, end in zip(SPEEDS, ends, strict=True)]
    typicals = [typical(stretch) for stretch in stretches]
    followed = []
    for stretch, old, new in zip(stretches[1:], typicals, typicals[1:], strict=False):
        way = [(share - old) / (new - old) for share in stretch]
        followed.append(next(place for place, part in enumerate(way) if part >= 0.8))
    print(f"\nshares of {2 * BATCH} at {list(SPEEDS.values())}: {typicals}; 80 % of the way after {followed} steps")
    assert max(followed) <= 20
    assert typicals[2] < typicals[0] < typicals[1]
    alone = fit(
        model=make_model,
        optimizer=make_optimizer,
        step=step,
        dataset=TensorData(X, Y),
        batch_size=2 * BATCH,
        epochs=10,
        devices="cpu",
        progress="off",
    )
    for name, value in alone.params.items():
        torch.testing.assert_close(state.params[name], value, rtol=1e-10, atol=1e-10)
