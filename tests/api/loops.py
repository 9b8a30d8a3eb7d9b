"""Loops of one's own on threads, what they train, and how they are compared with plain PyTorch."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.ranks import Silent, ThreadGroup, on_threads
from tests.train.exact_runs import OPTIMIZERS, Net, X, Y
from uneven import InputError, TrainedState
from uneven.api.loop import Loop
from uneven.api.loop_inputs import as_module, check_loop, optimizer_factory
from uneven.config import RunConfig, Task, resolve
from uneven.data.sample_order import permutation
from uneven.data.tensors import TensorData
from uneven.errors import RankError
from uneven.hardware.device import parse_devices
from uneven.launch.training import collect
from uneven.train.rank_info import RankInfo
from uneven.train.requests import Requests
from uneven.train.worker import Worker

SETTINGS: dict[str, Any] = {"batch_size": 16, "global_batch_size": 24, "epochs": 2, "seed": 3}
DATA = TensorData(X.double(), Y)


class RunOnThreads:
    """What is around a loop, for a rank that is a thread."""

    was_interrupted = False

    def __init__(self, group: Any, config: RunConfig) -> None:
        self._group = group
        self._config = config

    def make_worker(self, task: Task) -> Worker:
        group = self._group
        rank_info = RankInfo(group.rank, parse_devices(["cpu"] * group.world_size))
        return Worker(task, self._config, rank_info, lambda _: group, Requests(), Silent())

    def save(self, worker: Worker, was_interrupted: bool) -> TrainedState:
        return collect(worker.group, worker.result(), worker.axis)

    def end(self) -> None: ...


def make_loop(
    group: ThreadGroup,
    scheduler: Any = None,
    model: Any = None,
    optimizer: Any = OPTIMIZERS["sgd"],
    before_step: Any = None,
    dataset: Any = DATA,
    **changes: Any,
) -> Loop:
    config: RunConfig = resolve({**SETTINGS, **changes})
    check_loop(config, group.world_size, optimizer)
    module = as_module(Net(torch.float64) if model is None else model)
    make_optimizer = optimizer_factory(module, optimizer)
    task = Task(
        lambda: module, make_optimizer, lambda *_: None, dataset, scheduler, is_own_loop=True, before_step=before_step
    )

    return Loop(task, RunOnThreads(group, config))


def run_epochs(loop: Loop, epochs: range = range(2), seen: list[int] | None = None) -> None:
    for epoch in epochs:
        for x, y in loop.batches(epoch):
            if seen is not None:
                seen.append(len(x))
            loop.step(F.cross_entropy(loop(x), y))


def assert_equal(states: list[TrainedState], dense: TrainedState) -> None:
    for state in states:
        for name, value in state.params.items():
            torch.testing.assert_close(value, dense.params[name], rtol=1e-10, atol=1e-10)
            assert torch.equal(value, states[0].params[name])
    assert any((value - dict(Net(torch.float64).named_parameters())[name]).abs().max() > 0.01
               for name, value in dense.params.items())  # fmt: skip


def on_ranks_catching(size: int, function: Callable[[ThreadGroup], Any]) -> list[BaseException | None]:
    def rank(group: ThreadGroup) -> BaseException | None:
        try:
            function(group)
        except (InputError, RankError) as error:
            return error
        return None

    return on_threads(size, rank)


SLOT = 24


Batch = tuple[Tensor, Tensor]


def plain_batches(epoch: int, size: int = SLOT) -> Iterator[Batch]:
    """The global batches of an epoch, as one device sees them."""
    order = torch.from_numpy(permutation(3, epoch, len(X)))
    return ((X.double()[rows], Y[rows]) for rows in order.split(size))


def assert_params(states: list[TrainedState], expected: dict[str, Tensor]) -> None:
    for state in states:
        for name, value in state.params.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-10)
            assert torch.equal(value, states[0].params[name])


def step_each(loop: Loop, batch: Any) -> None:
    loop.step(F.cross_entropy(loop(batch[0]), batch[1]))


class Pair(nn.Module):
    """A generator or a discriminator: 6 numbers to 6, or to 1."""

    def __init__(self, outputs: int, seed: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, outputs)).double()
        own = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=own, dtype=torch.float64) * 0.4)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


NOISE = torch.randn(70, 6, generator=torch.Generator().manual_seed(9)).double()


GAN_DATA = TensorData(X.double(), NOISE)


def d_losses(g: nn.Module, d: nn.Module, real: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    return F.softplus(-d(real)).mean(), F.softplus(d(g(noise).detach())).mean()


def g_loss(g: nn.Module, d: nn.Module, noise: Tensor) -> Tensor:
    return F.softplus(-d(g(noise))).mean()


def train_loop(size: int, **changes: Any) -> list[TrainedState]:
    def rank(group: ThreadGroup) -> TrainedState:
        with make_loop(group, **changes) as loop:
            run_epochs(loop)
        return loop.finish()  # once more: the same state

    return on_threads(size, rank)
