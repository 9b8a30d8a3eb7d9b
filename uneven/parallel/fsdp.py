"""FSDP (ZeRO-3): params, gradients and optimizer state are sharded; a unit is unsharded while it computes.

A unit is a part of the model, such as a block; params in no unit belong to the root, which stays unsharded from the
start of forward to the end of backward. Every rank calls each unit once and in one order, so the order of all
collectives is known beforehand (units.py), and a rank without samples can take part (`backward_without_samples`). The
next unit is prefetched while one computes. Gradients are reduced unit by unit, on a process group of their own.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.optim import Optimizer

from uneven.comm.torch_group import AnyGroup, as_group
from uneven.errors import InputError
from uneven.parallel.buckets import bucket_bytes
from uneven.parallel.elementwise import refuse_by_elements
from uneven.parallel.flat_shards import FlatShards, ReshardableShards, Shard, checked_shares, has_no_memory
from uneven.parallel.hooks import running_backward, weakly
from uneven.parallel.param_guards import NoConversion, ParamReads
from uneven.parallel.sharded_optimizer import ShardedOptimizer
from uneven.parallel.sharded_reducer import ShardedReducer
from uneven.parallel.strategy import (
    NO_OPTIONS,
    AnyOptimizer,
    FitOptions,
    FullState,
    check_same_model,
    check_trainable,
    full_model_state,
    optimizer_of,
    sync_initial_state,
    tensors_by_name,
)
from uneven.parallel.survivors import CanSurvive, gatherer
from uneven.parallel.units import Unit, UnshardOrder, blocks_of, params_by_unit

BLOCKS = (
    "all ranks must call each once and in one order; choose others (in fit by a method fsdp_units() of the model, else "
    "by units=), or use strategy='zero2'"
)


class FSDP(CanSurvive):
    """`group` is a torch process group or one of ours; None is torch's default group. `shares`: how much each rank
    holds. `units`: modules in the order in which they are called, by default the entries of the model's ModuleLists.
    `compute_dtype`: of unsharded params and of floating inputs; shards and summed gradients keep the dtype that the
    params were made in.

    One forward, then its backward, which reduces into the owners' shards: `no_sync` keeps no full gradients. Evaluation
    (without gradients) all-gathers too, so all ranks must run the same number of forwards.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: AnyOptimizer = None,
        group: AnyGroup = None,
        *,
        shares: Sequence[float] | None = None,
        units: Sequence[nn.Module] | None = None,
        compute_dtype: torch.dtype | None = None,
        bucket_mb: float | None = None,
        options: FitOptions = NO_OPTIONS,
    ) -> None:
        self._group = ranks = as_group(group)
        self._ends_groups = ranks is not group  # those made from it: torch's own group stays
        self._copies = copies = options.copies
        share_list = checked_shares(shares, ranks)
        check_trainable(model)
        is_made = not any(map(has_no_memory, model.parameters()))
        (sync_initial_state if is_made else check_same_model)(model, ranks)
        self.module = model
        self._compute_dtype = compute_dtype
        # Made while params are whole: some optimizers read them.
        made = None if optimizer is None else optimizer_of(model, optimizer)
        if made is not None:
            refuse_by_elements(made, "FSDP")
        chosen = blocks_of(model) if units is None else list(units)
        self._units = [
            Unit(name, params, share_list, ranks, compute_dtype, copies)
            for name, params in params_by_unit(model, chosen)
        ]
        self._called = 0
        self._without_graph: set[int] = set()  # units of this forward that have no hook for backward
        self._unit_of: dict[FlatShards, Unit] = {s: unit for unit in self._units for s in unit.flat_shards}
        self._shards_of: dict[nn.Parameter, list[tuple[ReshardableShards, Shard]]] = {}
        for shards, shard in self._held_shards():
            self._shards_of.setdefault(shard.param, []).append((shards, shard))
        self._trained = [s for unit in reversed(self._units) for s in unit.flat_shards if s.params[0].requires_grad]
        reduce_group = ranks.new_group()
        reduce_group.traffic = ranks.traffic  # counted together
        max_bytes = bucket_bytes(bucket_mb)
        self._reducer = ShardedReducer(self._trained, reduce_group, max_bytes, weakly(self._gradients_done), copies)
        self._unshard_order = UnshardOrder(self._units, self._reducer)
        if made is not None:
            self.use_optimizer(made)
        self._handles = [
            handle for place, unit in enumerate([model, *chosen]) for handle in self._register(unit, place)
        ]
        self._handles.append(NoConversion(self))

    @torch.no_grad()
    def put(self, param: nn.Parameter, values: Tensor) -> None:
        """Take this rank's shards of a param from its whole memory: where the model was sharded before it was made."""
        for shards, shard in self._shards_of.get(param, ()):
            shards.value_of(shard).copy_(values[shard.start : shard.stop])

    def backward_without_samples(self) -> None:
        self._unshard_order.begin()
        self._reducer.backward_without_samples()

    def scale(self, factor: Tensor) -> None:
        self._reducer.scale(factor)

    def clip(self, max_norm: float) -> Tensor:
        return self._reducer.clip(max_norm)

    def watch_reads(self) -> ParamReads:
        """A context for a train step: what reads params outside of their unit's forward is refused."""
        unit_of = {param: unit for shards, unit in self._unit_of.items() for param in shards.params}
        return ParamReads(self.module, lambda param: unit_of[param].is_here, _refuse_absent)

    def full_params(self) -> dict[str, Tensor]:
        return {name: self._gathered(param) for name, param in self.module.named_parameters()}

    def full_gradients(self) -> dict[str, Tensor | None]:
        return {name: self._reducer.full_gradient(param) for name, param in self.module.named_parameters()}

    def full_state(self) -> FullState:
        model = full_model_state(self.module, lambda param: self._gathered(param).cpu())
        return FullState(model, self.optimizer.state_dict())

    @torch.no_grad()
    def load_full_state(self, state: FullState) -> None:
        tensors = tensors_by_name(self.module, state.model)
        values = {tensor: state.model[key] for key, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}
        for shards, shard in self._held_shards():
            full = torch.empty_like(shard.param, dtype=shards.reduce_dtype).copy_(values[shard.param])
            shards.value_of(shard).copy_(shard.of(full))
        for key, tensor in tensors.items():
            if not isinstance(tensor, nn.Parameter):
                tensor.copy_(state.model[key])
        self.optimizer.load_state_dict(state.optimizer)

    def close(self) -> None:
        self._remove_hooks()
        self._unshard_order.reset()
        for param in self.module.parameters():
            param.data = self._gathered(param)
        if self._ends_groups:
            self._group.close()

    def _shards_to_survive(self) -> Sequence[FlatShards]:
        return list(self._unit_of)

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._reducer.close()

    def _applied(self, optimizer: Optimizer) -> Optimizer:
        refuse_by_elements(optimizer, "FSDP")
        self._sharded = ShardedOptimizer(optimizer, self._group, flat_shards=self._trained, copies=self._copies)
        self._sharded.take_gradients_from(self._reducer)
        return self._sharded

    def _held_shards(self) -> Iterator[tuple[ReshardableShards, Shard]]:
        for unit in self._units:
            for shards in unit.flat_shards:
                for shard in (shard for rank in shards.held for shard in shards.shards_of(rank)):
                    yield shards, shard

    def _gathered(self, param: nn.Parameter) -> Tensor:
        """A whole param from all ranks' shards; one at a time, to hold little memory."""
        return gatherer(list(self._unit_of), self._group, [self._group.rank])(param)

    def _register(self, module: nn.Module, place: int) -> Iterator[Any]:
        pre_forward, post_forward = weakly(self._pre_forward), weakly(self._post_forward)
        # Before the user's own, which may read params: torch.nn.utils.weight_norm makes the weight in such a hook.
        yield module.register_forward_pre_hook(partial(pre_forward, place), with_kwargs=True, prepend=True)
        yield module.register_forward_hook(partial(post_forward, place))

    def _pre_forward(self, place: int, _: nn.Module, args: Any, kwargs: Any) -> Any:
        if running_backward() is not None:  # recomputed from a checkpoint
            if place in self._without_graph:
                raise InputError(
                    f"strategy='fsdp': a checkpoint with use_reentrant=True recomputes {self._units[place].name}, "
                    "whose params are gone then; use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
                )
            # Where the checkpoint goes on behind the unit, no gradient has asked for its params yet.
            self._pre_backward(place)
            return None
        if any(level.key() in (TransformType.Grad, TransformType.Jvp) for level in get_interpreter_stack() or ()):
            raise InputError(
                "strategy='fsdp': the train step calls the model inside a transform of torch.func (grad, jvp), which "
                "cannot see params that are gathered meanwhile; use strategy='zero2'"
            )
        if place == 0:
            self._unshard_order.begin()
            self._called = 0
            self._without_graph.clear()
        if place != self._called:
            due = self._units[self._called].name if self._called < len(self._units) else "the end"
            raise InputError(
                f"strategy='fsdp': block {self._units[place].name} was called where {due} was due, and {BLOCKS}"
            )
        self._called += 1
        if not torch.is_grad_enabled():
            self._without_graph.add(place)
        self._unshard_order.pre_forward(place, not torch.is_grad_enabled())
        if place and torch.is_grad_enabled() and self._units[place].has_frozen:
            return self._watch_inputs(self._units[place], args, kwargs)
        if place == 0 and self._compute_dtype is not None:
            cast = partial(_cast, self._compute_dtype)
            return tuple(map(cast, args)), {key: cast(value) for key, value in kwargs.items()}
        return None

    def _post_forward(self, place: int, _: nn.Module, args: Any, output: Any) -> None:
        del args
        if running_backward() is not None:
            return
        forward_only = not torch.is_grad_enabled()
        tensors = list(_tensors(output))
        has_backward = any(tensor.requires_grad for tensor in tensors)
        self._unshard_order.post_forward(place, forward_only=forward_only, has_backward=has_backward)
        if place == 0 and self._called < len(self._units):
            raise InputError(f"strategy='fsdp': block {self._units[self._called].name} was not called, and {BLOCKS}")
        if place == 0 and forward_only:
            self._unshard_order.reset()
        pre_backward = partial(_call_for_gradient, weakly(self._gradient_came), place)
        if not tensors and not forward_only:
            # Backward would come to the unit without notice, after its params are gone.
            raise InputError(
                f"strategy='fsdp': {self._units[place].name} returns a {type(output).__name__}, in which no tensor is "
                "found; return tensors, tuples, lists, dicts or dataclasses of them"
            )
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(pre_backward)

    def _gradient_came(self, place: int) -> None:
        if torch.is_grad_enabled():
            raise InputError(
                "strategy='fsdp': create_graph=True (torch.autograd.grad in the loss, as in a gradient penalty) needs "
                "params again, and they are gathered for one backward; use strategy='zero2'"
            )
        if self._unshard_order.is_over:
            raise InputError(
                "strategy='fsdp': this is the second backward since the last forward, and params are gathered for one: "
                "call backward after each forward, or once on the sum of the losses, or use strategy='zero2'"
            )
        self._pre_backward(place)

    def _pre_backward(self, place: int) -> None:
        self._reducer.begin_backward()
        self._unshard_order.pre_backward(place)

    def _watch_inputs(self, unit: Unit, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """A unit's arguments, with a view in place of each tensor that has a gradient: one input may go to several
        units, as an encoder's output to all blocks of a decoder, and has its gradient when all of them are through.
        """
        views: dict[int, Tensor] = {}  # what is given several times stays one tensor

        def own(value: Any) -> Any:
            is_watched = isinstance(value, Tensor) and value.requires_grad
            return views.setdefault(id(value), value.view_as(value)) if is_watched else value

        seen = tuple(own(value) for value in args), {key: own(value) for key, value in kwargs.items()}
        unit.watch_inputs(_tensors([*seen[0], *seen[1].values()]), partial(weakly(self._reshard_when_done), unit))
        return seen

    def _gradients_done(self, shards: FlatShards) -> None:
        unit = self._unit_of[shards]
        unit.gradients_done(shards)
        self._reshard_when_done(unit)

    def _reshard_when_done(self, unit: Unit) -> None:
        if unit is not self._units[0] and unit.is_done:
            unit.reshard()


def _call_for_gradient(method: Callable[[int], None], place: int, grad: Tensor) -> None:
    del grad
    method(place)


def _refuse_absent(name: str) -> str:
    return (
        f"strategy='fsdp': the train step reads {name} outside of its block's forward, where it is not here; for a "
        "penalty in the loss use the optimizer's weight_decay, for a weight that two layers share leave its module out "
        "of the model's fsdp_units(), or use strategy='zero2'"
    )


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
    elif is_dataclass(output) and not isinstance(output, type):
        for entry in fields(output):
            yield from _tensors(getattr(output, entry.name))
