"""FSDP (ZeRO-3): params, gradients and optimizer state are cut among ranks; a unit is whole while it computes.

A unit is a part of the model, a block say; what is in no unit makes the root, which stays whole from the start of
forward to the end of backward. Every rank calls the units once each and in their order: so all ranks gather in one
order, known beforehand, and a rank without samples can follow (`sit_out`). The next unit's params are on their way
while one computes. Gradients go to their owners unit by unit, on a road of their own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from uneven.comm.group import Group
from uneven.parallel.buckets import BUCKET_BYTES
from uneven.parallel.hooks import at_the_end_of_backward, running_backward, weakly
from uneven.parallel.owner_reducer import OwnerReducer
from uneven.parallel.pieces import Pieces, checked_shares, flat_memory
from uneven.parallel.sharded_optimizer import ShardedOptimizer
from uneven.parallel.strategy import FullState, MakeOptimizer, held_by_name, start_alike, whole_state
from uneven.parallel.units import Unit, UnshardOrder, blocks_of, members


class FSDP:
    """`shares` says how much each rank holds. `units` are modules in the order in which they are called; by default the
    members of the model's lists of modules. `compute_dtype` is that of whole params, and what floating inputs are cast
    to; pieces and sums of gradients keep the type that the params were made in.

    One forward, then its backward; evaluation (without gradients) gathers too, so all ranks evaluate alike.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        group: Group,
        *,
        shares: Sequence[float] | None = None,
        units: Sequence[nn.Module] | None = None,
        compute_dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        each = checked_shares(shares, group)
        start_alike(model, group)
        self.module = model
        self._group = group
        self._compute_dtype = compute_dtype
        optimizer = make_optimizer(model.parameters())
        chosen = blocks_of(model) if units is None else list(units)
        self._units = [Unit(*one, each, group.rank, compute_dtype) for one in members(model, chosen)]
        self._unshard_order = UnshardOrder(self._units, group)
        self._called = 0
        self._backward: int | None = None
        trained = [one for unit in reversed(self._units) for one in unit.shards if one.params[0].requires_grad]
        self._unit_of = {one: unit for unit in self._units for one in unit.shards}
        road = group.new_group()
        road.traffic = group.traffic  # one account for both
        self._reducer = OwnerReducer(trained, road, bucket_bytes, weakly(self._has_gradients))
        sharded = ShardedOptimizer(optimizer, group, pieces=trained)
        sharded.take_gradients_from(self._reducer)
        self.optimizer: Optimizer = sharded
        self._handles = [handle for place, one in enumerate([model, *chosen]) for handle in self._watch(one, place)]

    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing changes inside: every backward sums into the owners' pieces, so no full gradients are kept."""
        return nullcontext()

    def sit_out(self) -> None:
        self._unshard_order.reset()
        self._unshard_order.follow()
        self._reducer.sit_out()
        self._unshard_order.reset()

    def scale(self, factor: Tensor) -> None:
        self._reducer.scale(factor)

    def clip(self, max_norm: float) -> Tensor:
        return self._reducer.clip(max_norm)

    def full_state(self) -> FullState:
        model = whole_state(self.module, lambda param: self._joined(param).cpu())
        return FullState(model, self.optimizer.state_dict())

    @torch.no_grad()
    def load_full_state(self, state: FullState) -> None:
        held = held_by_name(self.module, state.model)
        values = {one: state.model[key] for key, one in held.items() if isinstance(one, nn.Parameter)}
        for shards, segment in self._segments():
            lying = torch.empty_like(segment.param, dtype=shards.own.dtype).copy_(values[segment.param])
            shards.own_part(segment).copy_(segment.of(lying))
        for key, one in held.items():
            if not isinstance(one, nn.Parameter):
                one.copy_(state.model[key])
        self.optimizer.load_state_dict(state.optimizer)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._reducer.close()
        self._unshard_order.reset()
        for param in self.module.parameters():
            param.data = self._joined(param)

    def _segments(self) -> Iterator[Any]:
        for unit in self._units:
            for shards in unit.shards:
                for segment in shards.segments(self._group.rank):
                    yield shards, segment

    @torch.no_grad()
    def _joined(self, param: nn.Parameter) -> Tensor:
        """A param from everyone's pieces, in the type it was made in; one at a time, so that little is whole."""
        (shards,) = (one for one in self._unit_of if param in one.starts)
        whole = torch.zeros_like(param, dtype=shards.own.dtype)
        for segment in shards.segments(self._group.rank):
            if segment.param is param:
                segment.of(whole).copy_(shards.own_part(segment))
        self._group.all_reduce(flat_memory(whole)).wait()
        return whole

    def _watch(self, module: nn.Module, place: int) -> Iterator[Any]:
        enter, leave = weakly(self._enter), weakly(self._leave)
        yield module.register_forward_pre_hook(partial(enter, place), with_kwargs=True)
        yield module.register_forward_hook(partial(leave, place))

    def _enter(self, place: int, _: nn.Module, args: Any, kwargs: Any) -> Any:
        if running_backward() is not None:  # computed again from a checkpoint: whole already
            return None
        if place == 0:
            self._unshard_order.reset()  # a forward that had no backward
            self._called = 0
        if place != self._called:
            due = self._units[self._called].name if self._called < len(self._units) else "the end"
            raise RuntimeError(
                f"unit {self._units[place].name!r} was called where {due!r} was due: every unit is called once, in the "
                "order of units=; choose others (in fit: by a method fsdp_units() of the model)"
            )
        self._called += 1
        self._unshard_order.enter(place, not torch.is_grad_enabled())
        if place == 0 and self._compute_dtype is not None:
            cast = partial(_cast, self._compute_dtype)
            return tuple(map(cast, args)), {key: cast(value) for key, value in kwargs.items()}
        return None

    def _leave(self, place: int, _: nn.Module, args: Any, output: Any) -> None:
        del args
        if running_backward() is not None:
            return
        is_alone = not torch.is_grad_enabled()
        self._unshard_order.left(place, is_alone)
        if place == 0 and self._called < len(self._units):
            raise RuntimeError(
                f"unit {self._units[self._called].name!r} was not called: every rank must call all units"
            )
        if place == 0 and is_alone:
            self._unshard_order.end(is_alone)
        before_backward = partial(_tell, weakly(self._enter_back), place)
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(before_backward)

    def _enter_back(self, place: int) -> None:
        if self._backward != running_backward():
            self._backward = running_backward()
            at_the_end_of_backward(self._end)
            self._reducer.begin()
        self._unshard_order.enter_back(place)

    def _has_gradients(self, pieces: Pieces) -> None:
        """All nodes that use the trained params have run. Frozen ones may still be needed on the way to the inputs."""
        unit = self._unit_of[pieces]  # type: ignore[index]
        if unit is not self._units[0] and not unit.has_frozen:
            unit.drop()

    def _end(self) -> None:
        self._backward = None
        self._unshard_order.end()


def _tell(method: Callable[[int], None], place: int, grad: Tensor) -> None:
    del grad
    method(place)


def _cast(dtype: torch.dtype, value: Any) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _tensors(output: Any) -> Iterator[Tensor]:
    """All tensors of a module's output, however they are nested."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
