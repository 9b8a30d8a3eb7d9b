"""A step of all ranks whose gradients a strategy sums while backward runs, and leaves where it wants to."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from uneven.comm.gather import gather_rows
from uneven.comm.group import Group
from uneven.data.tensors import Batch
from uneven.parallel.strategy import Strategy
from uneven.step.eager import Backward, EagerStep


class StrategyStep(EagerStep):
    """Takes the place of the step it is made of. A micro-batch of None sits out.

    `is_together`: all ranks train the same samples, so what they count is counted once.
    """

    def __init__(self, eager: EagerStep, strategy: Strategy, group: Group, *, is_model_parallel: bool) -> None:
        super().__init__(
            strategy.module, strategy.optimizer, eager.train_step, eager.precision, eager.meter, eager.max_grad_norm
        )
        self._strategy, self._group = strategy, group
        self._counts_here = group.rank == 0 or not is_model_parallel

    def sum_gradients(
        self,
        batches: Sequence[tuple[Batch | None, int]],
        slot_samples: int,
        row: Callable[[], Sequence[float]],
        backward: Backward | None = None,
    ) -> tuple[list[list[float]], Tensor | None]:
        assert backward is None, "what is captured has whole params"
        self.optimizer.zero_grad()
        counts = self.backward(batches, slot_samples)
        own = float(counts) if counts is not None and self._counts_here else 0.0
        return self.counted(gather_rows(self._group, [*row(), own]))

    def update(self, counts: Tensor | None) -> None:
        if counts is not None:
            self._strategy.scale(1.0 / counts.clamp(min=1))
        if self.max_grad_norm is not None:
            self._strategy.clip(self.max_grad_norm)
        self.optimizer.step()

    def summing(self, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_last else self._strategy.no_sync()

    def backward_of(self, batch: Batch | None, samples: int, slot_samples: int) -> Tensor | None:
        if batch is None:
            self._strategy.sit_out()
            return None
        return super().backward_of(batch, samples, slot_samples)
