"""A step of several ranks under a strategy that shards the model or its gradients (zero2, fsdp, tensor, sequence),
or whose optimizer sums gradients itself (MuonAdamW).

The strategy sums gradients while backward runs and keeps them where it wants, so statistics need a collective of
their own.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from uneven.comm.gather import gather_rows
from uneven.comm.group import Group
from uneven.data.tensors import Batch
from uneven.parallel.fsdp import FSDP
from uneven.parallel.strategy import Strategy
from uneven.parallel.tensor_parallel import SequenceParallel, TensorParallel
from uneven.step.eager import DerivedStep, EagerStep, Rows, Stats, split_checks
from uneven.step.finite import GradientWatch, OwnCheck


class StrategyStep(DerivedStep):
    """Takes the place of the EagerStep it is made from. A micro-batch of None is a rank's step without samples.

    `is_model_parallel`: all ranks train the same samples, so only rank 0's count is added up.
    """

    def __init__(self, eager: EagerStep, strategy: Strategy, group: Group, *, is_model_parallel: bool = False) -> None:
        plain = eager.plain if isinstance(eager, StrategyStep) else eager
        super().__init__(plain)
        self.plain: EagerStep = plain  # of a rank that is left alone
        self.model = strategy.module
        self.optimizer = strategy.optimizer
        if isinstance(strategy, FSDP | SequenceParallel):
            self.train_step = self._first_step
        self._strategy = strategy
        self._group = group
        self._is_model_parallel = is_model_parallel
        self._is_first = True  # no gradients have been compared yet
        self._watch = GradientWatch(strategy.module.parameters())

    def forward_backward(
        self, batches: Sequence[tuple[Batch | None, int]], slot_samples: int, stats: Stats
    ) -> tuple[Rows, list[OwnCheck]]:
        counts = self._backward_once(batches, slot_samples)
        if self._is_first and batches and isinstance(self._strategy, TensorParallel):
            self._is_first = False
            self._strategy.check_unsharded_gradients()
        is_counted = self._group.rank == 0 or not self._is_model_parallel
        # Gradients are sharded by now: this rank's own were looked at while backward computed them.
        own = self.sent_check(counts if is_counted else None, self._watch.take())
        return split_checks(gather_rows(self._group, [*stats(), *own.tolist()]))

    def prepare_update(self, counts: Tensor | None) -> Tensor | None:
        if counts is not None:
            self._strategy.scale(1.0 / counts)
        most = self.before_update.max_grad_norm
        return None if most is None else self._strategy.clip(most)

    def close(self) -> None:
        super().close()
        self._watch.close()

    def _first_step(self, model: nn.Module, batch: Batch) -> Any:
        """Reads of params that cannot be right are looked for once: every operation costs more meanwhile."""
        self.train_step = self.plain.train_step
        assert isinstance(self._strategy, FSDP | SequenceParallel)
        with self._strategy.watch_reads():
            return self.train_step(model, batch)

    def _zero_gradients(self) -> None:
        self.optimizer.zero_grad()
        for param in self._outside:
            param.grad = None

    def no_sync(self) -> AbstractContextManager[None]:
        return self._strategy.no_sync()

    def backward_of(self, batch: Batch | None, samples: int, slot_samples: int) -> Tensor | None:
        if batch is None:
            self._strategy.backward_without_samples()
            return None
        return super().backward_of(batch, samples, slot_samples)
