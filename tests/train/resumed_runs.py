"""Runs on threads that are stopped and resumed, with what they are compared by."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from tests.ranks import Silent, ThreadGroup, on_threads
from tests.train.exact_runs import OPTIMIZERS, X, Y, mean_loss
from tests.train.exact_runs import Net as PlainNet
from uneven.config import Evaluation, Task, resolve
from uneven.data.tensors import TensorData
from uneven.hardware.device import parse_devices
from uneven.launch.training import collect
from uneven.results.state import TrainedState
from uneven.train.callbacks import Callback, CallbackInfo
from uneven.train.rank_info import RankInfo
from uneven.train.requests import Requests
from uneven.train.worker import Worker

EXACT = {"batch_size": 8, "global_batch_size": 24}  # 3 slots an epoch


CADENCE = {"batch_size": 8, "policy": "cadence", "anchor": 2}  # 9 slots an epoch


ASYNC = {"batch_size": 8, "policy": "async", "anchor": 2}


DATA = TensorData(X.double(), Y)


class Net(PlainNet):
    """With buffers that training changes."""

    def __init__(self) -> None:
        super().__init__(torch.float64)
        self.norm = nn.BatchNorm1d(9).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.norm(self.first(x))))


def one_cycle(optimizer: Any, steps: int) -> LRScheduler:
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=steps + 1)


class StopAt(Callback):
    """Asks for a stop as Ctrl-C does, after this step of the first rank that gets there."""

    def __init__(self, step: int, stop: threading.Event) -> None:
        self._step, self._stop = step, stop

    def on_step(self, info: CallbackInfo) -> None:
        if info.step >= self._step:
            self._stop.set()


def train(
    size: int,
    *,
    make_model: Callable[[], nn.Module] = Net,
    data: Any = DATA,
    optimizer: str = "sgd",
    scheduler: Any = None,
    evaluation: Evaluation | None = None,
    callbacks: Any = lambda stop: (),
    watch: Callable[[Worker], object] | None = None,
    **changes: Any,
) -> TrainedState:
    """The state of a whole run, checked to be exactly once; `callbacks(stop)` makes each rank's own."""
    config = resolve({"batch_size": 8, "epochs": 3, "seed": 3, "lr_scale": 1.0, **changes})
    devices, requests = parse_devices(["cpu"] * size), Requests()

    def rank(group: ThreadGroup) -> TrainedState:
        own = tuple(callbacks(requests.stop))
        task = Task(
            make_model,
            OPTIMIZERS[optimizer],
            mean_loss,
            data,
            scheduler,
            evaluation,
            callbacks=own,
        )
        worker = Worker(task, config, RankInfo(group.rank, devices), lambda _: group, requests, Silent())
        if watch is not None:
            watch(worker)
        return collect(group, worker.train(), worker.axis)

    return on_threads(size, rank)[0]


def assert_same(found: TrainedState, wanted: TrainedState, tolerance: float = 0.0) -> None:
    assert found.slot == wanted.slot
    assert found.finished
    for name, value in {**wanted.params, **wanted.buffers}.items():
        other = {**found.params, **found.buffers}[name]
        if tolerance:
            assert torch.allclose(other, value, rtol=0, atol=tolerance), name
        else:
            assert torch.equal(other, value), name


def metrics(state: TrainedState) -> list[dict[str, Any]]:
    times = ("train_seconds", "samples_per_s")
    return [{name: value for name, value in entry.items() if name not in times} for entry in state.history]


SAME = {
    "sync": {**EXACT, "policy": "sync"},
    "balanced": {**EXACT, "shares": (5, 2)},
    "cadence": {**CADENCE, "shares": (3, 1)},
}
