"""Runs by steps on threads, and the plain loop that they are compared with."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from tests.ranks import Silent, ThreadGroup, on_threads
from tests.train.exact_runs import OPTIMIZERS, Net, X, Y, mean_loss
from tests.train.local_runs import SEED, train_slot
from uneven.config import Evaluation, Task, resolve
from uneven.data.sample_order import prove_exactly_once
from uneven.data.tensors import TensorData
from uneven.hardware.device import parse_devices
from uneven.policy.axis import Axis
from uneven.results.state import TrainedState
from uneven.train.rank_info import RankInfo, RankResult
from uneven.train.requests import Requests
from uneven.train.worker import Worker

AXIS = Axis(len(X), 24, 100)  # 3 slots an epoch, the last of 22 samples


LOCAL = {"batch_size": 8, "policy": "cadence", "anchor": 2, "global_batch_size": None}  # 9 slots an epoch


def eval_step(model: nn.Module, batch: Any) -> tuple[dict[str, Any], int]:
    return {"loss": F.cross_entropy(model(batch[0]), batch[1], reduction="sum")}, len(batch[1])


EVALUATION = Evaluation(TensorData(X[:37].double(), Y[:37]), eval_step)


def train(
    size: int,
    *,
    scheduler: Any = None,
    evaluation: Evaluation | None = None,
    callbacks: Any = (),
    is_whole: bool = True,
    stop: Requests | None = None,
    **changes: Any,
) -> list[RankResult]:
    """Workers on threads; `callbacks` is a list of them, the same objects on all ranks, or a function of the rank."""
    config = resolve({"batch_size": 16, "global_batch_size": 24, "seed": SEED, **changes})
    data = TensorData(X.double(), Y)
    devices = parse_devices(["cpu"] * size)

    def rank(group: ThreadGroup) -> RankResult:
        own = tuple(callbacks(group.rank) if callable(callbacks) else callbacks)
        task = Task(
            partial(Net, torch.float64), OPTIMIZERS["sgd"], mean_loss, data, scheduler, evaluation, callbacks=own
        )
        info = RankInfo(group.rank, devices)
        return Worker(task, config, info, lambda _: group, stop or Requests(), Silent()).train()

    results = on_threads(size, rank)
    axis = Axis(len(X), config.slot_size(size), config.epochs, max_slots=config.max_steps)
    prove_exactly_once(axis, [result.log for result in results], axis.total if is_whole else None)
    for result in results[1:]:
        assert all(torch.equal(value, results[0].state.params[name]) for name, value in result.state.params.items())
    return results


class Plain:
    """A plain loop over the same batches: its model after so many steps, with a scheduler of torch's own."""

    def __init__(self, make_scheduler: Any = None, follow: int | None = None, every: int = 1) -> None:
        """`follow`: step a ReduceLROnPlateau after so many steps, by the test loss; `every`: any other scheduler."""
        self.model = Net(torch.float64)
        self.optimizer = OPTIMIZERS["sgd"](self.model.parameters())
        self.scheduler = None if make_scheduler is None else make_scheduler(self.optimizer)
        self.follow, self.every = follow, every

    def train(self, start: int, stop: int) -> "Plain":
        for slot in AXIS.slots(start, stop):
            train_slot(self.model, self.optimizer, slot.epoch, slot.first, slot.samples, mean_loss, None)
            is_plateau = isinstance(self.scheduler, ReduceLROnPlateau)
            if isinstance(self.scheduler, LRScheduler) and not is_plateau and (slot.index + 1) % self.every == 0:
                self.scheduler.step()
            if self.follow is not None and (slot.index + 1) % self.follow == 0:
                self.scheduler.step(self.loss())
        return self

    def loss(self) -> float:
        with torch.no_grad():
            sums, count = eval_step(self.model, (X[:37].double(), Y[:37]))
        return float(sums["loss"]) / count

    def assert_equal(self, state: TrainedState) -> None:
        wanted = {name: param.detach() for name, param in self.model.named_parameters()}
        start = {name: param.detach() for name, param in Net(torch.float64).named_parameters()}
        assert max(float((wanted[name] - start[name]).abs().max()) for name in wanted) > 0.01
        for name, value in state.params.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-10, atol=1e-10)
