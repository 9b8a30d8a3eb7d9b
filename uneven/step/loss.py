"""Losses: what a train step may return, and the meter that adds them up.

A train step returns the batch's mean loss, (loss_sum, count), or the output of a model of transformers, whose count
is found by its labels; anything else is refused in one line. Ranks of an
exact policy tell each other with every step what their meters hold (finite.py, OwnCheck), so that the losses of a lost
rank count in its epoch (train/settle.py).
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uneven.comm.group import Group
from uneven.comm.host_copy import copy_to_host_async
from uneven.errors import InputError

WANTED = "it must return the batch's mean loss as one scalar tensor, or (loss_sum, count)"
IGNORED = -100  # torch's ignore_index, and the label that transformers pads with

# Rounding of a loss, relative: of params in fp32 or fp64, and in half precision.
EXACT, ROUNDED = 1e-6, 3e-5


class OutputStep:
    """The user's train step, which may return an output with a loss: then its loss comes back as read_loss takes it.

    [Note: the count of an output] The loss of an output is a mean over the labels of the batch that are not -100. A
    language model that predicts the next token leaves out the first one of each sample, and nothing in the output says
    so. But its logits do: whichever mean of their cross entropy is the loss, with this shift or without, is it for
    good. So the first output settles it, on each rank by itself and without a further forward.
    """

    def __init__(self, train_step: Callable[[nn.Module, Any], Any]) -> None:
        self._train_step = train_step
        self._shift: int | None = None  # labels that each sample leaves out at its beginning, once it is known

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        result = self._train_step(model, batch)
        if isinstance(result, Tensor):
            return result
        loss = loss_of_output(result)
        if loss is None:
            return result
        labels = batch.get("labels") if isinstance(batch, Mapping) else getattr(batch, "labels", None)
        if labels is None or (isinstance(labels, Tensor) and labels.is_floating_point()):
            return loss  # a mean over samples, as any other
        if self._shift is None:
            self._shift = _find_shift(result, loss.detach(), labels)
        count = (_without_first(labels, self._shift or 0) != IGNORED).sum()
        return torch.where(count > 0, loss, 0) * count, count  # without labels the mean is 0 / 0


def loss_of_output(result: Any) -> Tensor | None:
    """The loss of an output, as models of transformers make it: an attribute, or an entry of a mapping."""
    if isinstance(result, Tensor | tuple):
        return None
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


def _find_shift(output: Any, loss: Tensor, labels: Any) -> int | None:
    """How many labels each sample leaves out at its beginning; None where the batch has none. InputError if unknown."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(labels, Tensor) and bool((labels == IGNORED).all()):
        return None
    if isinstance(logits, Tensor) and isinstance(labels, Tensor) and logits.shape[:-1] == labels.shape:
        wide = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
        noise = EXACT if logits.dtype.itemsize >= 4 else ROUNDED
        for shift in range(min(2, labels.ndim)):
            scores = wide[:, : wide.shape[1] - shift] if labels.ndim > 1 else wide
            mean = F.cross_entropy(
                scores.reshape(-1, wide.shape[-1]), _without_first(labels, shift).reshape(-1), ignore_index=IGNORED
            )
            if abs(float(mean) - float(loss)) <= noise * abs(float(loss)):
                return shift
    raise InputError(
        "the train step returned an output whose loss is not the mean cross entropy of its .logits with "
        "batch['labels'], so the labels that it is a mean over are not known: return (out.loss * count, count), where "
        "count is their number as a tensor"
    )


def _without_first(labels: Tensor, count: int) -> Tensor:
    return labels[:, count:] if count else labels


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
        hint = ": pass its .loss" if loss_of_output(loss) is not None else ""
        hint = ": return the tensor, without .item()" if isinstance(loss, float) else hint
        raise InputError(f"the train step returned {describe(loss)}; {WANTED}{hint}")
    if not loss.requires_grad:
        raise InputError(
            "the train step returned a loss without a graph (detached, computed under no_grad, or not from the model's "
            "trained params): return the loss as the model's forward gave it, before detach or backward"
        )
    return loss.squeeze() if loss.ndim else loss, None if count is None else _without_dimensions(count)


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
