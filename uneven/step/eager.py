"""One optimizer step on one rank, run operation by operation: micro-batches in, updated params out.

The arithmetic of the whole project starts here: losses are divided by the slot's sample count and gradients are
SUMMED, so micro-batches and ranks of unequal size need no weights of their own. With several ranks the Reducer sums
gradients over them between backward and update.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from uneven.config import TrainStep
from uneven.data.tensors import Batch
from uneven.errors import InputError
from uneven.parallel.batchnorm import BatchNormSync
from uneven.parallel.reducer import Reducer
from uneven.step.meter import LossMeter
from uneven.step.precision import Precision
from uneven.step.schedule import required_arguments

# (batches or inputs, the slot's samples) -> the count that gradients must still be divided by, if any
Backward = Callable[[Sequence[tuple[Any, int]], int], Tensor | None]
BeforeStep = Callable[[nn.Module, Optimizer], object]  # called with the summed gradients in place


class EagerStep:
    """Life cycle: called with (batches, slot_samples) once per slot; losses are added up in `meter`.

    A step of several ranks is `sum_gradients` and then `update`; for it `reducer` is set when the group has formed.
    A loop of the user's own may run micro-batches ahead of the step, one by one: `accumulate`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        train_step: TrainStep,
        precision: Precision,
        meter: LossMeter,
        max_grad_norm: float | None,
        batchnorm_sync: BatchNormSync | None = None,
        *,
        max_grad_value: float | None = None,
        before_step: BeforeStep | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.train_step = train_step
        self.precision = precision
        self.meter = meter
        self.max_grad_norm = max_grad_norm
        self.batchnorm_sync = batchnorm_sync or BatchNormSync()
        self.max_grad_value = max_grad_value
        self.before_step = before_step
        self.reducer: Reducer | None = None
        self.is_further_loss = False  # of a batch that had a loss already: added to that one, not counted again
        self._has_begun = False
        self._accumulated: Tensor | None = None  # the counts of micro-batches ahead of the step

    def __call__(self, batches: Sequence[tuple[Batch, int]], slot_samples: int) -> None:
        """A step of this rank alone."""
        self.begin()
        counts = self.backward(batches, slot_samples)
        self._has_begun = False
        self.update(counts)

    def begin(self) -> None:
        """Zero the gradients before the first micro-batch of a step; once a step."""
        if not self._has_begun:
            self._zero_gradients()
            self._has_begun = True

    def accumulate(self, batch: Batch, samples: int, slot_samples: int) -> None:
        """A micro-batch ahead of its step, without any collective."""
        self.begin()
        with self.micro_batch_context(is_last=False):
            self._accumulated = _added(self._accumulated, self.backward_of(batch, samples, slot_samples))

    def cancel(self) -> None:
        """Forget what was accumulated for a step that is not taken."""
        self._has_begun, self._accumulated = False, None

    def sum_gradients(
        self,
        batches: Sequence[tuple[Batch, int]],
        slot_samples: int,
        stats: Callable[[], Sequence[float]],
        backward: Backward | None = None,
    ) -> tuple[list[list[float]], Tensor | None]:
        """The first half of a step of all ranks: backward, and gradients summed over ranks. `update` is the second.

        Returns every rank's statistics (this rank's `stats` is called just before the last bucket is sent) and the
        count for `update`. `backward` replaces the method of that name; its inputs then take the place of batches.
        """
        assert self.reducer is not None, "the reducer is made when the group has formed"
        self.begin()
        counts = (backward or self.backward)(batches, slot_samples)
        self._has_begun = False
        return self.split_counts(self.reducer.finalize(lambda: [*stats(), 0.0], counts))

    @staticmethod
    def split_counts(rows: list[list[float]]) -> tuple[list[list[float]], Tensor | None]:
        """Take the counts off the ends of the ranks' rows; returns the rows and the sum of the counts."""
        total = sum(row.pop() for row in rows)
        # If losses are means over samples, no rank has a count. A rank without samples learns only here which it is.
        return rows, torch.tensor(total, dtype=torch.float64) if total else None

    def backward(self, batches: Sequence[tuple[Batch, int]], slot_samples: int) -> Tensor | None:
        """Sum gradients over the micro-batches; returns the count they must still be divided by, if any.

        A micro-batch of 0 samples is a dummy batch: it takes part in SyncBatchNorm's collectives and counts nothing.
        """
        counts, self._accumulated = self._accumulated, None
        for place, (batch, samples) in enumerate(batches):
            with self.micro_batch_context(is_last=place == len(batches) - 1):
                counts = _added(counts, self.backward_of(batch, samples, slot_samples))
        return counts

    def micro_batch_context(self, is_last: bool) -> AbstractContextManager[None]:
        """Around a micro-batch's backward: only the last one's gradients are sent to the other ranks."""
        return nullcontext() if is_last or self.reducer is None else self.reducer.no_sync()

    def backward_of(self, batch: Batch, samples: int, slot_samples: int) -> Tensor | None:
        """One micro-batch; returns its count if the train step returned one."""
        with self.precision.region(), self.batchnorm_sync.dummy_batch(samples == 0):
            result = self.train_step(self.model, batch)
        loss, count = self.weigh(result, samples, slot_samples)
        self.precision.scaler.scale(loss).backward()
        return count

    def weigh(self, result: Any, samples: int, slot_samples: int) -> tuple[Tensor, Tensor | None]:
        """A train step's result as this micro-batch's part of the slot's loss, and its count if there is one."""
        count: Tensor | None = None
        if isinstance(result, tuple):
            # (loss_sum, count), of tokens for instance: the count of all ranks is known only after the sum.
            loss, units = result if samples else (result[0] * 0, 0)
            count = _on_device(0 if self.is_further_loss else units, loss.device)
            self.meter.add(loss.detach(), count)
        else:
            loss = _checked_loss(result) * (samples / slot_samples)
            self.meter.add(loss.detach() * slot_samples, 0 if self.is_further_loss else samples)
        return loss, count

    def close(self) -> None:
        """Remove the reducer's hooks and gradients from the model."""
        if self.reducer is not None:
            self.reducer.close()
            for param in self.model.parameters():
                param.grad = None  # a view of a bucket

    def update(self, counts: Tensor | None) -> None:
        self.update_by(self.optimizer, list(self.model.parameters()), counts)

    def update_by(self, optimizer: Optimizer, params: list[nn.Parameter], counts: Tensor | None) -> None:
        """Divide the gradients by the count, show them to `before_step`, clip those of `params`, step."""
        scaler = self.precision.scaler
        if any(item is not None for item in (counts, self.before_step, self.max_grad_value, self.max_grad_norm)):
            scaler.unscale_(optimizer)
        if counts is not None:
            grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            # With a count of 0 (all tokens masked) gradients are zero: divide by 1, not by 0.
            torch._foreach_div_(grads, counts.clamp(min=1).to(grads[0].dtype))
        if self.before_step is not None:
            with torch.no_grad():
                self.before_step(self.model, optimizer)
        if self.max_grad_value is not None:
            torch.nn.utils.clip_grad_value_(params, self.max_grad_value)
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(params, self.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()

    def _zero_gradients(self) -> None:
        if self.reducer is not None:
            self.reducer.prepare()
        else:
            self.optimizer.zero_grad(set_to_none=True)


def adapt_before_step(function: Callable[..., object] | None) -> BeforeStep | None:
    """The user's hook, which may take the model alone, or nothing, as one of (model, optimizer)."""
    if function is None:
        return None
    count = min(2, required_arguments(function))
    return lambda *given: function(*given[:count])


def _added(counts: Tensor | None, count: Tensor | None) -> Tensor | None:
    return counts if count is None else count if counts is None else counts + count


def _on_device(count: Any, device: torch.device) -> Tensor:
    """As a double. A host number becomes a fill kernel: a copy from host memory could not be captured."""
    if isinstance(count, Tensor) and count.device == device:
        return count.detach().to(torch.float64)
    return torch.full((), float(count), dtype=torch.float64, device=device)


def _checked_loss(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise InputError(
            f"the train step returned {what}; it must return the batch's mean loss as one scalar tensor, "
            "or (loss_sum, count)"
        )
    return loss
