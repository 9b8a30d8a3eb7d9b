"""One optimizer step on one rank, run operation by operation: micro-batches in, updated params out.

The arithmetic of the whole project starts here: losses are divided by the slot's count and gradients are
SUMMED, so micro-batches and ranks of unequal size need no weights of their own. With several ranks the sum over
them stands between backward and update.
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
from uneven.parallel.gradients import GradientRoad
from uneven.step.meter import LossMeter
from uneven.step.precision import Precision

# (batches or inputs, the slot's samples) -> the count that gradients must still be divided by, if any
Backward = Callable[[Sequence[tuple[Any, int]], int], Tensor | None]


class EagerStep:
    """Life cycle: `step(batches, slot_samples)` once per slot; the loss gathers in `meter`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        train_step: TrainStep,
        precision: Precision,
        meter: LossMeter,
        max_grad_norm: float | None,
        batchnorm_sync: BatchNormSync | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.train_step = train_step
        self.precision = precision
        self.meter = meter
        self.max_grad_norm = max_grad_norm
        self.batchnorm_sync = batchnorm_sync or BatchNormSync()
        self.road: GradientRoad | None = None

    def __call__(self, batches: Sequence[tuple[Batch, int]], slot_samples: int) -> None:
        """A step of this rank alone."""
        self.optimizer.zero_grad(set_to_none=True)
        self.update(self.backward(batches, slot_samples))

    def sum_gradients(
        self,
        batches: Sequence[tuple[Batch, int]],
        slot_samples: int,
        row: Callable[[], Sequence[float]],
        backward: Backward | None = None,
    ) -> tuple[list[list[float]], Tensor | None]:
        """The first half of a step of all ranks: gradients summed over them, for `update` to follow.

        Returns every rank's row (asked for just before the last bucket leaves) and the count for `update`. `backward`
        is another form of the method of that name, and then its inputs take the place of batches.
        """
        assert self.road is not None, "a road is laid when the group forms"
        self.road.start()
        counts = (backward or self.backward)(batches, slot_samples)
        return self.counted(self.road.finish(lambda: [*row(), 0.0], counts))

    @staticmethod
    def counted(rows: list[list[float]]) -> tuple[list[list[float]], Tensor | None]:
        """Rows without the counts at their ends, and what these sum up to."""
        total = sum(one.pop() for one in rows)
        # Where the unit is the sample, nobody has a count; a rank without samples learns here which it is.
        return rows, torch.tensor(total, dtype=torch.float64) if total else None

    def backward(self, batches: Sequence[tuple[Batch, int]], slot_samples: int) -> Tensor | None:
        """Sum gradients over the micro-batches; returns the count they must still be divided by, if any.

        One of 0 samples is a phantom: it takes part in what ranks compute together and counts for nothing.
        """
        counts: Tensor | None = None
        for place, (batch, samples) in enumerate(batches):
            with self.summing(is_last=place == len(batches) - 1):
                count = self.backward_of(batch, samples, slot_samples)
            if count is not None:
                counts = count if counts is None else counts + count
        return counts

    def summing(self, is_last: bool) -> AbstractContextManager[None]:
        """Around a micro-batch: with the last one gradients begin to leave for the sum over ranks."""
        if is_last and self.road is not None:
            self.road.open()
        return nullcontext()

    def backward_of(self, batch: Batch, samples: int, slot_samples: int) -> Tensor | None:
        """One micro-batch; returns its count where the unit is not the sample."""
        count: Tensor | None = None
        with self.precision.region(), self.batchnorm_sync.dummy_batch(samples == 0):
            result = self.train_step(self.model, batch)
        if isinstance(result, tuple):
            # The unit is not the sample (tokens, say): the true count is known only after the sum.
            loss, units = result if samples else (result[0] * 0, 0)
            count = _on_device(units, loss.device)
            self.meter.add(loss.detach(), count)
        else:
            loss = _checked(result) * (samples / slot_samples)
            self.meter.add(loss.detach() * slot_samples, samples)
        self.precision.scaler.scale(loss).backward()
        return count

    def close(self) -> None:
        """The model is the user's alone again."""
        if self.road is not None:
            self.road.close()
            for param in self.model.parameters():
                param.grad = None  # a view of the road

    def update(self, counts: Tensor | None) -> None:
        scaler = self.precision.scaler
        if counts is not None or self.max_grad_norm is not None:
            scaler.unscale_(self.optimizer)
        if counts is not None:
            grads = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
            # A slot without a single unit (all tokens masked) has zero gradients: divide by 1, not by 0.
            torch._foreach_div_(grads, counts.clamp(min=1).to(grads[0].dtype))
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        scaler.step(self.optimizer)
        scaler.update()


def _on_device(count: Any, device: torch.device) -> Tensor:
    """As a double; a number of the host's is written into a kernel's call, since a copy could not be captured."""
    if isinstance(count, Tensor) and count.device == device:
        return count.detach().to(torch.float64)
    return torch.full((), float(count), dtype=torch.float64, device=device)


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise InputError(
            f"the train step returned {what}; it must return the batch's mean loss as one scalar tensor, "
            "or (loss_sum, count)"
        )
    return loss
