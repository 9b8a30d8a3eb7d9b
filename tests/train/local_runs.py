"""Runs of local policies on threads, and the dense computation that they are compared with."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from tests.ranks import Silent, ThreadGroup, on_threads
from tests.train.exact_runs import OPTIMIZERS, Net, X, Y, mean_loss
from uneven.config import Evaluation, Task, resolve
from uneven.data.sample_order import permutation, prove_exactly_once
from uneven.data.tensors import TensorData
from uneven.hardware.device import parse_devices
from uneven.policy.axis import Axis
from uneven.policy.scale import ramp
from uneven.train.rank_info import RankInfo, RankResult
from uneven.train.requests import Requests
from uneven.train.worker import Worker

SEED = 3


def train(
    size: int,
    *,
    optimizer: Any = "sgd",
    step: Any = mean_loss,
    scheduler: Any = None,
    evaluation: Evaluation | None = None,
    make_model: Callable[[], nn.Module] | None = None,
    stop: Requests | None = None,
    is_whole: bool = True,
    **changes: Any,
) -> list[RankResult]:
    config = resolve({"batch_size": 8, "epochs": 3, "seed": SEED, "policy": "cadence", "anchor": 2, **changes})
    make_optimizer = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    model, data = make_model or partial(Net, torch.float64), TensorData(X.double(), Y)
    task = Task(model, make_optimizer, step, data, scheduler, evaluation)
    devices = parse_devices(["cpu"] * size)

    def rank(group: ThreadGroup) -> RankResult:
        return Worker(
            task, config, RankInfo(group.rank, devices), lambda _: group, stop or Requests(), Silent()
        ).train()

    results = on_threads(size, rank)
    axis = Axis(len(X), config.slot_size(size), config.epochs)
    prove_exactly_once(axis, [result.log for result in results], axis.total if is_whole else None)
    assert_replicas_equal(results)
    return results


def assert_replicas_equal(results: list[RankResult]) -> None:
    first = {**results[0].state.params, **results[0].state.buffers}
    for result in results[1:]:
        for name, value in {**result.state.params, **result.state.buffers}.items():
            assert torch.equal(value, first[name]), name


def dense(
    counts: tuple[int, ...],
    *,
    optimizer: str,
    step: Any = mean_loss,
    scheduler: Any = None,
    is_by_epoch: bool = False,
    max_grad_norm: float | None = None,
    accumulate: int = 1,
    scale: float,
    epochs: int = 3,
    skipped: Collection[int] = (),
    max_steps: int | None = None,
) -> dict[str, torch.Tensor]:
    """Local SGD written down once more, in one process: replicas in turn, averages by samples at the windows' ends."""
    axis = Axis(len(X), 8 * accumulate, epochs, max_slots=max_steps)
    models = [Net(torch.float64) for _ in counts]
    optimizers = [OPTIMIZERS[optimizer](model.parameters()) for model in models]
    schedulers = [scheduler(one) if scheduler else None for one in optimizers]
    positions = [0] * len(counts)
    plain = [[group["lr"] for group in one.param_groups] for one in optimizers]
    start = 0
    while start < axis.total:
        left = axis.total - start
        length = sum(counts) if left >= 2 * sum(counts) else left - left // 2 if left > sum(counts) else left
        end = start + length
        cut = apportioned(counts, end - start)
        weights = []
        slot = start
        for rank, many in enumerate(cut):
            model, own = models[rank], optimizers[rank]
            weight = 0
            for index in range(slot, slot + many):
                place = axis.slot(index)
                for group, rate in zip(own.param_groups, plain[rank], strict=True):
                    group["lr"] = rate
                if schedulers[rank] is not None:
                    position = place.epoch if is_by_epoch else index
                    for _ in range(position - positions[rank]):
                        schedulers[rank].step()
                    positions[rank] = position
                    plain[rank] = [group["lr"] for group in own.param_groups]
                factor = ramp(scale, axis.samples_before(index), axis.samples, axis.total_samples)
                for group in own.param_groups:
                    group["lr"] *= factor
                if index in skipped:
                    continue
                train_slot(model, own, place.epoch, place.first, place.samples, step, max_grad_norm)
                weight += place.samples
            weights.append(weight)
            slot += many
        average_by(models, weights)
        start = end
    return {name: param.detach() for name, param in models[0].named_parameters()}


def apportioned(counts: tuple[int, ...], slots: int) -> list[int]:
    """Each next slot to the rank that would finish it first."""
    cut = [0] * len(counts)
    for _ in range(slots):
        cut[min(range(len(counts)), key=lambda rank: (cut[rank] + 1) / counts[rank])] += 1
    return cut


def train_slot(
    model: nn.Module, own: torch.optim.Optimizer, epoch: int, first: int, samples: int, step: Any, norm: float | None
) -> None:
    order = torch.from_numpy(permutation(SEED, epoch, len(X)))[first : first + samples]
    own.zero_grad()
    result = step(model, (X.double()[order], Y[order]))
    loss = result[0] / result[1].clamp(min=1) if isinstance(result, tuple) else result
    loss.backward()
    if norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), norm)
    own.step()


def average_by(models: list[nn.Module], weights: list[int]) -> None:
    with torch.no_grad():
        for params in zip(*(model.parameters() for model in models), strict=True):
            average = sum(param * (weight / sum(weights)) for param, weight in zip(params, weights, strict=True))
            for param in params:
                param.copy_(average)


def half_every_four(optimizer: Any) -> StepLR:
    return StepLR(optimizer, 4, gamma=0.5)
