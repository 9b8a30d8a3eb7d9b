"""Strategies whose ranks all hold the whole model: DDPFlat, DDPBucketed, and ZeRO-1 and ZeRO-2 above them.

`fit` and the benchmarks make them by `catalog.make_strategy`. The optimizer state (zero1) and the gradients (zero2)
are sharded by shares of memory, independently of how many samples each rank trains.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from uneven.comm.torch_group import AnyGroup, as_group
from uneven.errors import InputError
from uneven.parallel.buckets import UNLIMITED, bucket_bytes
from uneven.parallel.elementwise import changes_nothing
from uneven.parallel.flat_shards import FlatShards, checked_shares
from uneven.parallel.param_guards import NoConversion
from uneven.parallel.reducer import Reducer
from uneven.parallel.sharded_optimizer import ShardedOptimizer
from uneven.parallel.sharded_reducer import ShardedReducer
from uneven.parallel.strategy import (
    NO_OPTIONS,
    AnyOptimizer,
    FitOptions,
    Strategy,
    check_trainable,
    optimizer_of,
    sync_initial_state,
)
from uneven.parallel.survivors import CanSurvive


class Replicated(Strategy):
    """The whole model on every rank, with one Reducer; the optimizer may be a ShardedOptimizer (ZeRO-1).

    `group` is a torch process group or one of ours; None is torch's default group.
    """

    def __init__(
        self, model: nn.Module, optimizer: AnyOptimizer, group: AnyGroup, max_bytes: int, options: FitOptions
    ) -> None:
        check_trainable(model)
        self._group = as_group(group)
        if options.init_sync:
            sync_initial_state(model, self._group)
        self.module = model
        self._is_manual = options.num_stats is not None
        # Before the reducer, for a ShardedOptimizer moves the params.
        made = None if optimizer is None else self._applied(optimizer_of(model, optimizer))
        self.reducer = Reducer(
            model.parameters(), self._group, max_bytes, overlap=options.overlap, num_stats=options.num_stats
        )
        self._optimizer = made
        self._no_conversion = NoConversion(self)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.reducer.no_sync()

    def backward_without_samples(self) -> None:
        self.reducer.backward_without_samples()

    def close(self) -> None:
        self.reducer.close()
        self._no_conversion.remove()

    def _applied(self, optimizer: Optimizer) -> Optimizer:
        if getattr(optimizer, "sums_gradients", False):
            raise InputError(
                f"{type(optimizer).__name__} sums gradients over the ranks itself, and {type(self).__name__} has done "
                "so already: make it with sums_gradients=False, or train the plain model with it"
            )
        if not self._is_manual:  # by hand, params may be added later
            optimizer.register_step_pre_hook(_refuse_late_params(weakref.ref(self)))
        return optimizer


class DDPFlat(Replicated):
    """One bucket for each dtype and device, sent when backward has ended; no overlap."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: AnyOptimizer = None,
        group: AnyGroup = None,
        *,
        options: FitOptions = NO_OPTIONS,
    ) -> None:
        super().__init__(model, optimizer, group, UNLIMITED, replace(options, overlap=False))


class DDPBucketed(Replicated):
    """Buckets of at most `bucket_mb`, sent while backward computes; 0 sends every param by itself."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: AnyOptimizer = None,
        group: AnyGroup = None,
        *,
        bucket_mb: float | None = None,
        options: FitOptions = NO_OPTIONS,
    ) -> None:
        super().__init__(model, optimizer, group, bucket_bytes(bucket_mb), options)


class Zero1(Replicated, CanSurvive):
    """Optimizer state sharded, gradients and params whole. `shares`: each rank's part of the state; None is equal.

    `flat` sums gradients in one bucket after backward, as DDPFlat does; otherwise they leave in buckets during it.
    `by_tensors`: see ShardedOptimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: AnyOptimizer = None,
        group: AnyGroup = None,
        *,
        shares: Sequence[float] | None = None,
        by_tensors: bool | None = None,
        flat: bool = False,
        bucket_mb: float | None = None,
        options: FitOptions = NO_OPTIONS,
    ) -> None:
        if flat and bucket_mb is not None:
            raise InputError(f"bucket_mb={bucket_mb!r} with flat=True: there is one bucket; leave one of them out")
        self._shard = partial(ShardedOptimizer, shares=shares, by_tensors=by_tensors, copies=options.copies)
        max_bytes = UNLIMITED if flat else bucket_bytes(bucket_mb)
        super().__init__(model, optimizer, group, max_bytes, replace(options, overlap=options.overlap and not flat))

    def _applied(self, optimizer: Optimizer) -> Optimizer:
        self._sharded = self._shard(optimizer, self._group)
        return super()._applied(self._sharded)


class Zero2(CanSurvive):
    """Gradients and optimizer state sharded, params whole. `shares`: each rank's part of both; None is equal parts.

    Gradients are reduced from the moment that the strategy has its optimizer, in every backward: keeping full ones
    until the last micro-batch (`no_sync`) is what ZeRO-2 avoids.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: AnyOptimizer = None,
        group: AnyGroup = None,
        *,
        shares: Sequence[float] | None = None,
        by_tensors: bool | None = None,
        bucket_mb: float | None = None,
        options: FitOptions = NO_OPTIONS,
    ) -> None:
        check_trainable(model)
        self._group = as_group(group)
        sync_initial_state(model, self._group)
        self.module = model
        self._copies = options.copies
        self._shares = shares
        self._shard = partial(ShardedOptimizer, shares=shares, by_tensors=by_tensors, copies=options.copies)
        self._max_bytes = bucket_bytes(bucket_mb)
        self._sums: ShardedReducer | None = None
        self._no_conversion = NoConversion(self)
        if optimizer is not None:
            self.use_optimizer(optimizer)

    def backward_without_samples(self) -> None:
        self._reducer.backward_without_samples()

    def scale(self, factor: Tensor) -> None:
        self._reducer.scale(factor)

    def clip(self, max_norm: float) -> Tensor:
        return self._reducer.clip(max_norm)

    def full_gradients(self) -> dict[str, Tensor | None]:
        return {name: self._reducer.full_gradient(param) for name, param in self.module.named_parameters()}

    def close(self) -> None:
        if self._sums is not None:
            self._sums.close()
        self._no_conversion.remove()

    @property
    def _reducer(self) -> ShardedReducer:
        assert self.optimizer is not None  # raises while there is none
        assert self._sums is not None
        return self._sums

    def _applied(self, optimizer: Optimizer) -> Optimizer:
        self._sharded = self._shard(optimizer, self._group)
        # Params that the optimizer does not hold count in the norm that gradients are clipped by, as in one process.
        held = {param for settings in self._sharded.param_groups for param in settings["params"]}
        outside = [param for param in self.module.parameters() if param.requires_grad and param not in held]
        shares = checked_shares(self._shares, self._group)
        shards = [*self._sharded.flat_shards, *(FlatShards([param], shares, by_tensors=False) for param in outside)]
        self._sums = ShardedReducer(shards, self._group, self._max_bytes, copies=self._copies)
        self._sharded.take_gradients_from(self._sums)
        return self._sharded


def _refuse_late_params(strategy: "weakref.ref[Replicated]") -> Callable[..., None]:
    """A hook on the step: InputError for params that the reducer does not sum, or ranks would silently drift apart."""
    num_seen = 0
    frozen: list[nn.Parameter] = []

    def hook(optimizer: Optimizer, args: Any, options: Any) -> None:
        nonlocal num_seen
        del args, options
        alive, count = strategy(), sum(len(settings["params"]) for settings in optimizer.param_groups)
        if alive is None:
            return
        for param in frozen:
            if param.requires_grad:
                raise InputError(
                    f"a param of shape {tuple(param.shape)} did not require a gradient when the strategy was made, so "
                    "its gradients are not summed; when params are unfrozen, make strategy and optimizer again"
                )
        if count == num_seen:
            return
        num_seen = count
        params = [param for settings in optimizer.param_groups for param in settings["params"]]
        frozen[:] = [param for param in params if not param.requires_grad and not alive.reducer.has(param)]
        for param in params:
            if param.requires_grad and not alive.reducer.has(param):
                raise InputError(
                    f"a param of shape {tuple(param.shape)} was added to the optimizer, but its gradients are not "
                    "summed: it was no trained param of the model when the strategy was made; make the strategy again"
                )

    return changes_nothing(hook)
