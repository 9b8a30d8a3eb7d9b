"""Micro-batches of 0 samples, for ranks that have fewer of them than others where layers run collectives.

Used by GradientSync. Synchronised BatchNorm sums over ranks in every forward, and a sharded strategy gathers params: so
all ranks run equally many micro-batches, and those that have none left run dummies, which count nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from uneven.data.feed import Micros
from uneven.data.tensors import Batch
from uneven.policy.axis import Part
from uneven.train.engine import Engine


class DummyBatches:
    """Life cycle: `read` once where BatchNorm is synchronised, then `of` for every part."""

    def __init__(self, engine: Engine, is_model_parallel: bool) -> None:
        self._engine, self._is_model_parallel = engine, is_model_parallel
        self._inputs: Any = None

    def read(self) -> None:
        """One sample, to pass through the layers."""
        engine = self._engine
        _, ((self._inputs, _),) = next(engine.feed.stream([Part(engine.axis.slot(0), 0, 1, 1)]))

    def of(self, part: Part, shares_of: Callable[[int, int], Sequence[int]]) -> Micros:
        """What this rank runs after its own micro-batches of a part."""
        engine = self._engine
        if self._is_model_parallel or (engine.config.is_replicated and not engine.batchnorm_sync.is_open):
            return []
        shares = shares_of(part.slot.index, part.slot.samples)
        most = max(-(-share // engine.micro_batch_size(share, rank)) for rank, share in enumerate(shares))
        missing = range(most - len(part.sizes))
        # A strategy runs its own collectives without a batch; BatchNorm layers need one to pass through them.
        return [(self._open() if engine.config.is_replicated else None, 0) for _ in missing]

    def _open(self) -> Batch:
        """Without numbers that are not finite: 0 times them would still spoil the gradients of a rank's step."""
        batch = self._engine.feed.open(self._inputs)
        return pytree.tree_map_only(Tensor, lambda t: t.nan_to_num() if t.is_floating_point() else t, batch)
