"""An exact step adds few operations and calls to a plain loop: an operation costs as much as a small layer on a CPU."""

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import Silent
from uneven import TensorData
from uneven.comm.group import SoloGroup
from uneven.config import Task, resolve
from uneven.hardware.device import parse_devices
from uneven.train.rank_info import RankInfo
from uneven.train.requests import Requests
from uneven.train.worker import Worker

STEPS = 3
DATA = TensorData(torch.randn(64, 6), torch.randint(3, (64,)))


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.operations += 1
        return func(*args, **(kwargs or {}))


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def make_optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def plain_operations() -> float:
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    with Count() as count:
        for step in range(STEPS):
            batch = DATA.take(torch.arange(64)[4 * step : 4 * step + 4], None)
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    return float(count.operations) / STEPS


def test_a_step_of_one_rank_adds_few_operations_to_a_plain_loop() -> None:
    """43 on the mlp before 2026-11-17: the check of gradients, the loss meter, and numbers that the host could read."""
    config = resolve({"batch_size": 4, "epochs": 2, "devices": "cpu", "progress": "off"})
    task = Task(make_model, make_optimizer, loss_of, DATA)
    info = RankInfo(0, parse_devices("cpu"))
    worker = Worker(task, config, info, lambda _: SoloGroup(), Requests(), Silent())
    with worker.recording():
        synchronizer = worker.prepare()
        stream = worker.engine.feed.stream(synchronizer.parts())
        worker.train_part(synchronizer, *next(stream))  # makes what is made once
        with Count() as count:
            for _ in range(STEPS):
                worker.train_part(synchronizer, *next(stream))
    gradients = 4  # each has a sum, and the host reads it
    assert count.operations / STEPS <= plain_operations() + 2 * gradients + 8


def test_a_step_of_one_rank_calls_few_functions_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """126 before 2026-11-19, of features that a run does not have; see tools/step_overhead.py."""
    config = resolve({"batch_size": 4, "epochs": 2, "devices": "cpu", "progress": "off"})
    task = Task(make_model, make_optimizer, loss_of, DATA)
    worker = Worker(task, config, RankInfo(0, parse_devices("cpu")), lambda _: SoloGroup(), Requests(), Silent())
    monkeypatch.setattr("uneven.train.worker.REPORT_EVERY_S", 1e9)  # on a slow machine every step reports
    calls: list[str] = []

    def see(frame: FrameType, event: str, argument: Any) -> None:
        del argument
        if event == "call" and "/uneven/" in frame.f_code.co_filename:
            calls.append(frame.f_code.co_name)

    with worker.recording():
        synchronizer = worker.prepare()
        stream = worker.engine.feed.stream(synchronizer.parts())
        worker.train_part(synchronizer, *next(stream))
        sys.setprofile(see)
        try:
            for _ in range(STEPS):
                worker.train_part(synchronizer, *next(stream))
        finally:
            sys.setprofile(None)
        synchronizer.close()
    assert len(calls) / STEPS <= 85
