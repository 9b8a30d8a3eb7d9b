"""Losses: what a train step may return, and the meter that adds them up.

A train step returns the batch's mean loss, or (loss_sum, count); anything else is refused in one line. Ranks of an
exact policy tell each other with every step what their meters hold (finite.py, OwnCheck), so that the losses of a lost
rank count in its epoch (train/elastic/settle.py).
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from uneven.comm.group import Group
from uneven.comm.host_copy import copy_to_host_async
from uneven.errors import InputError

WANTED = "it must return the batch's mean loss as one scalar tensor, or (loss_sum, count)"


def read_loss(result: Any) -> tuple[Tensor, Any]:
    """The loss, and the count where the step returned one (else None); tensors come back without dimensions."""
    count: Any = None
    loss = result
    if isinstance(result, tuple):
        if len(result) != 2:
            raise InputError(f"the train step returned a tuple of {len(result)}; {WANTED}")
        loss, count = result
        if not is_number(count):
            raise InputError(f"the train step returned (loss, {describe(count)}); {WANTED}: nothing else beside it")
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        hint = ": return its .loss" if isinstance(getattr(loss, "loss", None), Tensor) else ""
        hint = ": return the tensor, without .item()" if isinstance(loss, float) else hint
        hint = ': return its ["loss"]' if type(loss) is dict and isinstance(loss.get("loss"), Tensor) else hint
        raise InputError(f"the train step returned {describe(loss)}; {WANTED}{hint}")
    if not loss.requires_grad:
        raise InputError(
            "the train step returned a loss without a graph (detached, computed under no_grad, or not from the model's "
            "trained params): return the loss as the model's forward gave it, before detach or backward"
        )
    return _without_dimensions(loss), _without_dimensions(count)


def _without_dimensions(value: Any) -> Any:
    """A loss of shape (1,), as a head with one output gives it, adds to the others as any number does."""
    return value.squeeze() if isinstance(value, Tensor) and value.ndim else value


def warn_of_fraction(count: Any) -> None:
    """A count between 0 and 1 is most likely an accuracy: the losses would be divided by it, without an error."""
    if 0 < float(count) < 1:
        warnings.warn(
            f"the train step returned (loss, {float(count):g}), which is read as (loss_sum, count): the losses are "
            "divided by the count; return the loss alone if the second is a metric",
            stacklevel=2,
        )


def is_number(value: Any) -> bool:
    """Whether it is one number, of Python's, numpy's or torch's."""
    is_single = value.numel() == 1 if isinstance(value, Tensor) else getattr(value, "size", 1) == 1
    return hasattr(value, "__float__") and is_single


def describe(value: Any) -> str:
    """What a user's step returned, in words."""
    if isinstance(value, tuple):
        return f"({', '.join(map(describe, value))})"
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


class LossMeter:
    """Adds up losses on the device, so that reading a loss does not stall training.

    Sum and count of the losses since the last `take`; `known` are every rank's, after the last step that counts."""

    def __init__(self, device: torch.device) -> None:
        self.totals = torch.zeros(2, dtype=torch.float64, device=device)
        self._loss_sum, self._count = self.totals.unbind()  # views: `totals[0] += loss` would run four operations
        self.known: list[tuple[float, float]] = []
        self._latest: float | None = None
        self._pending: tuple[Tensor, torch.cuda.Event] | None = None

    def add(self, loss: Tensor, count: int | Tensor, samples: int = 1) -> None:
        """Add a sum of losses with its count; or the mean loss of so many `samples`."""
        self._loss_sum.add_(loss, alpha=samples)
        self._count.add_(count)

    def learn(self, known: list[tuple[float, float]]) -> None:
        """Every rank's sum and count, after the last step that counts."""
        self.known = known

    def restore(self, totals: tuple[float, float]) -> None:
        """Sum and count of this rank, as they were in a checkpoint or before a loss."""
        self.totals.copy_(torch.tensor(totals, dtype=torch.float64))

    def halves(self) -> Tensor:
        """Sum and count for a sum in fp32: rounded to it, and the rest. Both together have 48 bits."""
        rounded = self.totals.float().double()
        return torch.cat([rounded, self.totals - rounded])

    def glance(self) -> float | None:
        """The mean loss so far, None where there is none yet: NaN is a loss that is NaN.

        Without waiting for the device: on CUDA it may lag by one glance."""
        if self.totals.device.type != "cuda":
            return self._mean(self.totals)
        if self._pending is not None and self._pending[1].query():
            self._latest = self._mean(self._pending[0])
            self._pending = None
        if self._pending is None:
            copied = torch.empty_like(self.totals, device="cpu", pin_memory=True)
            copied.copy_(self.totals, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
            self._pending = (copied, arrived)
        return self._latest

    def pop_async(self) -> Callable[[], tuple[float, float]]:
        """Reset the meter; the function returned waits for the device and gives this rank's sum and count until now."""
        copied = copy_to_host_async(self.totals)
        self.totals.zero_()
        self._pending = None

        def read() -> tuple[float, float]:
            loss_sum, count = copied().tolist()
            return loss_sum, count

        return read

    def take(self, group: Group) -> float:
        """The mean loss of all ranks since the last take; waits for the device and resets the meter."""
        own = torch.tensor(self.totals.tolist(), dtype=torch.float64)
        found = self._mean(group.all_reduce(own).wait())
        self.totals.zero_()  # not before: where a rank is lost, the rest takes the mean again
        self._pending = None
        self.known = [(0.0, 0.0)] * len(self.known)
        return float("nan") if found is None else found

    def _mean(self, totals: Tensor) -> float | None:
        loss_sum, count = totals.tolist()
        return loss_sum / count if count else None
