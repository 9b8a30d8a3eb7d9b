"""Strategies whose ranks all hold the whole model: DDPFlat, DDPBucketed, and ZeRO-1 and ZeRO-2 above them.

`fit` and the benchmarks make them by `catalog.make_strategy`. The optimizer state (zero1) and the gradients (zero2)
are sharded by shares of memory, independently of how many samples each rank trains.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.optim import Optimizer

from uneven.comm.group import Group
from uneven.parallel.buckets import UNLIMITED, bucket_bytes
from uneven.parallel.reducer import Reducer
from uneven.parallel.sharded_optimizer import ShardedOptimizer
from uneven.parallel.sharded_reducer import ShardedReducer
from uneven.parallel.strategy import (
    FullState,
    MakeOptimizer,
    check_trainable,
    gradients_of,
    on_host,
    scale_all,
    sync_initial_state,
)


class Replicated:
    """The whole model on every rank, with one Reducer; the optimizer may be a ShardedOptimizer (ZeRO-1).

    `init_sync=False` is for ranks whose models are known to be equal already. `num_stats` and `overlap` are the
    Reducer's; with `num_stats` the caller ends every reduction (see there).
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        group: Group,
        max_bytes: int,
        *,
        overlap: bool,
        num_stats: int | None = None,
        init_sync: bool = True,
    ) -> None:
        check_trainable(model)
        if init_sync:
            sync_initial_state(model, group)
        self.module = model
        self.optimizer = make_optimizer(model.parameters())
        self.reducer = Reducer(model.parameters(), group, max_bytes, overlap=overlap, num_stats=num_stats)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.reducer.no_sync()

    def backward_without_samples(self) -> None:
        self.reducer.backward_without_samples()

    def scale(self, factor: Tensor) -> None:
        scale_all(gradients_of(self.module), factor)

    def clip(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def full_state(self) -> FullState:
        return FullState(on_host(dict(self.module.state_dict())), on_host(self.optimizer.state_dict()))

    def load_full_state(self, state: FullState) -> None:
        self.module.load_state_dict(state.model)
        self.optimizer.load_state_dict(on_host(state.optimizer))  # PyTorch takes tensors that fit without a copy

    def close(self) -> None:
        self.reducer.close()


class DDPFlat(Replicated):
    """One bucket for each dtype and device, sent when backward has ended; no overlap."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        group: Group,
        *,
        num_stats: int | None = None,
        init_sync: bool = True,
    ) -> None:
        super().__init__(
            model, make_optimizer, group, UNLIMITED, overlap=False, num_stats=num_stats, init_sync=init_sync
        )


class DDPBucketed(Replicated):
    """Buckets of at most `bucket_mb`, sent while backward computes; 0 sends every param by itself."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        group: Group,
        *,
        bucket_mb: float | None = None,
        overlap: bool = True,
        num_stats: int | None = None,
        init_sync: bool = True,
    ) -> None:
        super().__init__(
            model,
            make_optimizer,
            group,
            bucket_bytes(bucket_mb),
            overlap=overlap,
            num_stats=num_stats,
            init_sync=init_sync,
        )


class Zero2:
    """Gradients and optimizer state sharded, params whole. `shares`: each rank's part of both; None is equal parts."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        group: Group,
        *,
        shares: Sequence[float] | None = None,
        by_tensors: bool = False,
        bucket_mb: float | None = None,
    ) -> None:
        check_trainable(model)
        sync_initial_state(model, group)
        self.module = model
        optimizer = ShardedOptimizer(make_optimizer(model.parameters()), group, shares=shares, by_tensors=by_tensors)
        self._reducer = ShardedReducer(optimizer.flat_shards, group, bucket_bytes(bucket_mb))
        optimizer.take_gradients_from(self._reducer)
        self.optimizer: Optimizer = optimizer

    def no_sync(self) -> AbstractContextManager[None]:
        """Changes nothing: keeping full gradients until the last micro-batch is what ZeRO-2 avoids."""
        return nullcontext()

    def backward_without_samples(self) -> None:
        self._reducer.backward_without_samples()

    def scale(self, factor: Tensor) -> None:
        self._reducer.scale(factor)

    def clip(self, max_norm: float) -> Tensor:
        return self._reducer.clip(max_norm)

    def full_state(self) -> FullState:
        return FullState(on_host(dict(self.module.state_dict())), self.optimizer.state_dict())

    def load_full_state(self, state: FullState) -> None:
        self.module.load_state_dict(state.model)
        self.optimizer.load_state_dict(state.optimizer)

    def close(self) -> None:
        self._reducer.close()
