"""Runs with steps that are not finite."""

import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from tests.train import exact_runs as exact
from tests.train.exact_runs import OPTIMIZERS, Net, Y, mean_loss
from uneven import TrainedState
from uneven.data.sample_order import permutation
from uneven.data.tensors import TensorData
from uneven.policy.axis import Axis

NAN, INF = math.nan, math.inf


BAD = 41  # the sample of a data set that holds a NaN


GLOBAL = 24


X = exact.X.double().clone()


SPOILT = X.clone()
SPOILT[BAD, 2] = NAN


DATA = TensorData(SPOILT, Y)


def bad_slots(axis: Axis, seed: int = 3, sample: int = BAD) -> dict[int, int]:
    """Slots that hold the bad sample, with the position of it in the epoch."""
    found = {}
    for epoch in range(axis.epochs):
        position = permutation(seed, epoch, axis.samples).tolist().index(sample)
        slot = next(s for s in axis.slots() if s.epoch == epoch and s.first <= position < s.stop)
        found[slot.index] = position
    return found


def plain(
    axis: Axis, skipped: Collection[int], *, optimizer: str = "sgd", norm: float | None = None, step: Any = mean_loss,
    make_model: Callable[[], nn.Module] = lambda: Net(torch.float64),
) -> tuple[nn.Module, torch.optim.Optimizer]:  # fmt: skip
    """One process, one batch per step, the given slots left out."""
    model = make_model()
    own = OPTIMIZERS[optimizer](model.parameters())
    for slot in axis.slots():
        if slot.index in skipped:
            continue
        order = torch.from_numpy(permutation(3, slot.epoch, axis.samples))[slot.first : slot.stop]
        own.zero_grad()
        result = step(model, (X[order], Y[order]))
        (result[0] / result[1] if isinstance(result, tuple) else result).backward()
        if norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), norm)
        own.step()
    return model, own


def assert_same_params(state: TrainedState, model: nn.Module) -> None:
    for name, value in model.named_parameters():
        torch.testing.assert_close(state.params[name], value.detach(), rtol=1e-10, atol=1e-10)


def spoiling(when: Callable[[torch.Tensor], bool], kind: str = "nan loss") -> Callable[[nn.Module, Any], Any]:
    """A step whose loss, or whose gradient alone, is not finite for the batches that `when` chooses."""

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = mean_loss(model, batch)
        if not when(batch[0]):
            return loss
        if kind == "gradient":  # finite forward; the derivative of a root at 0 is infinite
            return loss + (0.0 * next(model.parameters())).sum().abs().sqrt()
        return loss * (NAN if kind == "nan loss" else INF)

    return step
