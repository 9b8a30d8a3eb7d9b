"""ShardedOptimizer (ZeRO-1): each rank keeps the optimizer state of its own shard of the params and updates that.

Gradients must be summed before (by any DDP) or come from a `GradientSource`; after the step every owner's params are
sent to all ranks. Shares may be unequal or zero: they divide bytes and are independent of the ranks' sample counts.

State with the shape of its param is sharded as the param is. All other state (a step count, Adafactor's rows) belongs
to the whole param, and every rank that owns a shard of the param holds the same copy.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from uneven.comm.gather import gather_bytes
from uneven.comm.group import Group
from uneven.comm.work import WorkList
from uneven.parallel.buckets import view_like
from uneven.parallel.flat_shards import FlatShards, Shard, checked_shares, flat_memory, gradient_like, group_by_kind

STEP = "step"  # a count, never sharded: for a scalar param it has the shape of its param


class GradientSource(Protocol):
    """Holds the summed gradients of this rank's shards."""

    def start(self) -> None:
        """The optimizer's step begins."""
        ...

    def gradient_of(self, shard: Shard) -> Tensor | None: ...
    def finish(self) -> None:
        """The step has used all gradients."""
        ...

    def zero(self) -> None: ...


class ShardedOptimizer(Optimizer):
    """Takes the place of the optimizer it is made from, also for schedulers: `param_groups` has all params.

    `by_tensors` gives every param to one owner; otherwise params are sharded by elements, which only suits optimizers
    that treat every element by itself. `state_dict()` is a collective: all ranks call it, and each gets the state that
    the plain optimizer would have.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        group: Group,
        *,
        shares: Sequence[float] | None = None,
        by_tensors: bool = False,
        flat_shards: Sequence[FlatShards] | None = None,  # if the params are sharded already
    ) -> None:
        self._group = group
        self._inner: Optimizer | None = None
        self._source: GradientSource | None = None
        super().__init__([dict(settings) for settings in optimizer.param_groups], dict(optimizer.defaults))
        before = {param: dict(state) for param, state in optimizer.state.items()}
        optimizer.state.clear()
        if flat_shards is None:
            trained = [param for param in self._all_params() if param.requires_grad]
            checked = checked_shares(shares, group)
            flat_shards = [FlatShards(kind, checked, by_tensors=by_tensors) for kind in group_by_kind(trained)]
        self.flat_shards = list(flat_shards)
        self._by_tensors = by_tensors
        self._own = {
            shard.param: (shard, shards.optimized_param(shard))
            for shards in flat_shards
            for shard in shards.shards_of(group.rank)
        }
        for settings in optimizer.param_groups:
            settings["params"] = [self._own[param][1] for param in settings["params"] if param in self._own]
        self._inner = optimizer
        for param, (shard, optimized) in self._own.items():
            if param in before:  # an optimizer that makes its state at once
                optimizer.state[optimized] = _shard_state(before[param], shard, by_tensors)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._inner is not None:
            raise ValueError("a sharded optimizer cannot take more params: make it again with all of them")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = call_closure(closure)
        self.start()
        for works in self.update():
            works.wait()
        return loss

    def start(self) -> None:
        """The first part of a step: start the collectives that gradients still need."""
        if self._source is not None:
            self._source.start()

    @torch.no_grad()
    def update(self) -> list[WorkList]:
        """The second part: update this rank's shards and start to send them to all ranks."""
        assert self._inner is not None
        self._copy_settings()
        for param, (shard, optimized) in self._own.items():
            if self._source is not None:
                grad = self._source.gradient_of(shard)
                optimized.grad = grad if grad is None or optimized is not param else view_like(param, grad, 0)
            elif optimized is not param:
                optimized.grad = None if param.grad is None else shard.of(gradient_like(param))
        self._inner.step()
        for param, (_, optimized) in self._own.items():
            if optimized is not param or self._source is not None:
                optimized.grad = None
        if self._source is not None:
            self._source.finish()
        return [shards.all_gather(self._group) for shards in self.flat_shards]

    def take_gradients_from(self, source: GradientSource) -> None:
        """From now on the source's gradients are used, not the params' own."""
        self._source = source

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._source is not None:
            self._source.zero()
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        assert self._inner is not None
        places = {param: place for place, param in enumerate(self._all_params())}
        own = {
            places[param]: (shard, dict(self._inner.state.get(optimized, {})))
            for param, (shard, optimized) in self._own.items()
        }
        groups = [
            {
                **{key: value for key, value in settings.items() if key != "params"},
                "params": [places[p] for p in settings["params"]],
            }
            for settings in self.param_groups
        ]
        return {"state": _gather_state(self._group, self._all_params(), own, self._by_tensors), "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state of a plain optimizer, or of any number of ranks; each rank keeps its own shard of it."""
        assert self._inner is not None
        params = self._all_params()
        sizes = [len(settings["params"]) for settings in state_dict["param_groups"]]
        own_sizes = [len(settings["params"]) for settings in self.param_groups]
        if sizes != own_sizes:
            raise ValueError(f"the state has groups of {sizes} params, this optimizer has groups of {own_sizes}")
        for mine, theirs in zip(self.param_groups, state_dict["param_groups"], strict=True):
            mine.update({key: value for key, value in theirs.items() if key != "params"})
        self._inner.state.clear()
        for place, state in state_dict["state"].items():
            owned = self._own.get(params[int(place)])
            if owned is not None:
                shard, optimized = owned
                self._inner.state[optimized] = _shard_state(state, shard, self._by_tensors)

    def _all_params(self) -> list[nn.Parameter]:
        return [param for settings in self.param_groups for param in settings["params"]]

    def _copy_settings(self) -> None:
        """Pass on what a scheduler or a user has changed in `param_groups`."""
        assert self._inner is not None
        for mine, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({key: value for key, value in mine.items() if key != "params"})


def call_closure(closure: Callable[[], Any] | None) -> Any:
    """The loss that a step's closure computes, if there is one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _shard_state(state: Mapping[str, Any], shard: Shard, by_tensors: bool) -> dict[str, Any]:
    """A rank's part of a param's state, on the param's device; tensors are copies."""
    return {key: _shard_value(key, value, shard, by_tensors) for key, value in state.items()}


def _shard_value(key: str, value: Any, shard: Shard, by_tensors: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    if key == STEP:
        return value.detach().clone()
    param = shard.param
    if by_tensors or value.shape != param.shape:
        return value.detach().to(param.device, copy=True)
    full = torch.empty_like(param, dtype=value.dtype).copy_(value)
    return shard.of(full).clone()


def _gather_state(
    group: Group, params: Sequence[nn.Parameter], own: Mapping[int, tuple[Shard, dict[str, Any]]], by_tensors: bool
) -> dict[int, dict[str, Any]]:
    """All ranks' parts of every param's state put together, on the host of every rank. A collective."""
    layouts = {
        place: {key: _layout(key, value, shard, by_tensors) for key, value in state.items()}
        for place, (shard, state) in own.items()
        if state
    }
    by_rank = [json.loads(text) for text in gather_bytes(group, json.dumps(layouts).encode())]
    full_state: dict[int, dict[str, Any]] = {}
    for place, param in enumerate(params):
        owners = [rank for rank, theirs in enumerate(by_rank) if str(place) in theirs]
        if owners:
            shard, state = own.get(place, (None, {}))
            full_state[place] = {
                key: _gather_value(group, param, layout, owners[0], shard, state.get(key))
                for key, layout in by_rank[owners[0]][str(place)].items()
            }
    return full_state


def _layout(key: str, value: Any, shard: Shard, by_tensors: bool) -> dict[str, Any]:
    """What ranks without this state need to take part in gathering it; for a non-tensor, the value itself."""
    if not isinstance(value, Tensor):
        return {"value": value}
    is_sharded = not by_tensors and key != STEP and value.shape == (shard.stop - shard.start,)
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "is_sharded": is_sharded,
    }


def _gather_value(
    group: Group, param: nn.Parameter, layout: dict[str, Any], owner: int, shard: Shard | None, value: Any
) -> Any:
    if "value" in layout:
        return layout["value"]
    dtype = getattr(torch, layout["dtype"])
    if layout["is_sharded"]:
        full = torch.zeros_like(param, dtype=dtype)
        if shard is not None and value is not None:
            shard.of(full).copy_(value)
        group.all_reduce(flat_memory(full)).wait()
        return full.cpu()
    full = torch.zeros(layout["shape"], dtype=dtype, device=param.device)
    if group.rank == owner:
        full.copy_(value)
    group.broadcast(full, owner).wait()
    return full.cpu()
