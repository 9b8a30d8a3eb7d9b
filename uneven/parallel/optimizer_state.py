"""The state of a sharded optimizer: cut into the ranks' parts when it is loaded, put together when it is saved.

State with the shape of its param is sharded as the param is. All other state (a step count, Adafactor's rows) belongs
to the whole param, and every rank that owns a shard of the param holds the same copy. State may be nested: a list of
preconditioners, as Shampoo has it. Nothing is pickled: layouts travel as JSON, tensors by collectives.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from uneven.comm.gather import gather_json
from uneven.comm.group import Group
from uneven.errors import InputError
from uneven.parallel.flat_shards import Shard, flat_memory

# Numbers per param, never sharded: for a scalar param they have the shape of their param.
COUNTS = ("step", "mu_product", "eta", "mu")
ShardValues = Sequence[tuple[Shard, Any]]  # a rank's shards of one param, each with a value of its state


def shard_state(state: Mapping[str, Any], shard: Shard, by_tensors: bool) -> dict[str, Any]:
    """A rank's part of a param's state, on the param's device; tensors are copies."""

    def part(key: str, value: Tensor) -> Tensor:
        param = shard.param
        if key in COUNTS:
            return value.detach().clone()
        if by_tensors or value.shape != param.shape:
            return value.detach().to(param.device, copy=True)
        full = torch.empty_like(param, dtype=value.dtype).copy_(value)
        return shard.of(full).clone()

    return {key: _map_tensors(value, lambda tensor, key=key: part(key, tensor)) for key, value in state.items()}  # type: ignore[misc]


def gather_state(
    group: Group,
    params: Sequence[nn.Parameter],
    own: Mapping[int, Sequence[tuple[Shard, dict[str, Any]]]],
    by_tensors: bool,
) -> dict[int, dict[str, Any]]:
    """All ranks' parts of every param's state put together, on the host of every rank. A collective.

    `own` has the shards that this rank hands in and their state, by the place of the param; each shard is handed in by
    one rank.
    """
    found_at = {place: [(shard, state) for shard, state in found if state] for place, found in own.items()}
    layouts = {
        place: {key: _layout(key, value, found[0][0], by_tensors) for key, value in found[0][1].items()}
        for place, found in found_at.items()
        if found
    }
    by_rank = gather_json(group, layouts)
    full_state: dict[int, dict[str, Any]] = {}
    for place, param in enumerate(params):
        owners = [rank for rank, theirs in enumerate(by_rank) if str(place) in theirs]
        if owners:
            found = found_at.get(place, [])
            gathering = _Gathering(group, param, owners[0])
            full_state[place] = {
                key: gathering.value(layout, [(shard, state.get(key)) for shard, state in found])
                for key, layout in by_rank[owners[0]][str(place)].items()
            }
    return full_state


class _Gathering:
    """Puts together one param's state; all ranks go through its values in one order, given by the layout."""

    def __init__(self, group: Group, param: nn.Parameter, owner: int) -> None:
        self.group, self.param, self.owner = group, param, owner

    def value(self, layout: dict[str, Any], own: ShardValues) -> Any:
        if "value" in layout:
            return layout["value"]
        if "refused" in layout:
            raise InputError(layout["refused"])
        if "items" in layout:
            places = enumerate(layout["items"])
            found = [self.value(one, [(shard, value[place]) for shard, value in own]) for place, one in places]
            return tuple(found) if layout["is_tuple"] else found
        if "entries" in layout:
            entries = layout["entries"]
            return {key: self.value(one, [(shard, value.get(key)) for shard, value in own]) for key, one in entries}
        return self._tensor(layout, own)

    def _tensor(self, layout: dict[str, Any], own: ShardValues) -> Tensor:
        dtype, param = getattr(torch, layout["dtype"]), self.param
        if layout["is_sharded"]:
            full = torch.zeros_like(param, dtype=dtype)
            for shard, value in own:
                shard.of(full).copy_(value)
            self.group.all_reduce(flat_memory(full)).wait()
            return full.cpu()
        full = torch.zeros(layout["shape"], dtype=dtype, device=param.device)
        if self.group.rank == self.owner:
            full.copy_(own[0][1])
        self.group.broadcast(full, self.owner).wait()
        return full.cpu()


def _layout(key: str, value: Any, shard: Shard, by_tensors: bool) -> dict[str, Any]:
    """What ranks without this state need to take part in gathering it; for a plain value, the value itself."""
    if isinstance(value, Tensor):
        is_sharded = not by_tensors and key not in COUNTS and value.shape == (shard.stop - shard.start,)
        return {
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "is_sharded": is_sharded,
        }
    if isinstance(value, list | tuple):
        items = [_layout(key, one, shard, by_tensors) for one in value]
        return {"items": items, "is_tuple": isinstance(value, tuple)}
    if isinstance(value, dict) and all(isinstance(name, str | int) for name in value):
        return {"entries": [[name, _layout(key, one, shard, by_tensors)] for name, one in value.items()]}
    if value is None or isinstance(value, str | int | float | bool):
        return {"value": value}
    # Raised when all ranks have the layouts, and so on all of them.
    refused = f"optimizer state {key!r} is a {type(value).__name__}, which cannot be gathered from the ranks; tensors, "
    return {"refused": refused + "numbers, text, and lists and dicts of them can: use strategy='ddp-bucketed'"}


def _map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_tensors(one, change) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map_tensors(one, change) for one in value)
    return value
