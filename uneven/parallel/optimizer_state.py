"""What a sharded optimizer keeps: the state of its params, and the settings of its param groups.

State is cut into the ranks' parts when it is loaded, and put together when it is saved. State with the shape of its
param is sharded as the param is. All other state (a step count, Adafactor's rows) belongs to the whole param, and every
rank that owns a shard of the param holds the same copy. State may be nested: a list of preconditioners, as Shampoo has
it. Nothing is pickled: layouts travel as JSON, tensors by collectives.

[Note: settings of both sides] The user, or a scheduler, changes the settings of param groups outside; the inner
optimizer keeps numbers of its own there (the step count of a schedule-free optimizer, the estimate of Prodigy) or adds
keys later. Only what was changed outside since the last step is handed down, and what the inner one changed comes up.
Handing down everything undid the inner optimizer's own numbers at every step (params ended 2e-2 off).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from uneven.comm.gather import gather_json
from uneven.comm.group import Group
from uneven.errors import InputError
from uneven.parallel.flat_shards import Shard, flat_memory

# Numbers per param, never sharded: for a scalar param they have the shape of their param.
COUNTS = ("step", "mu_product", "eta", "mu")
PARAMS = "params"  # never handed on: the two sides have different ones
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

    return {key: tree_map_only(Tensor, partial(part, key), value) for key, value in state.items()}


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
        self.group = group
        self.param = param
        self.owner = owner

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


class GroupSettings:
    """The param groups of a sharded optimizer and of the one inside it, see [Note: settings of both sides].

    Life cycle: `hand_down` before every inner step, `take_up` after it; `add` when both sides have a new group.
    """

    def __init__(self, outer: Optimizer, inner: Optimizer) -> None:
        self._outer, self._inner = outer.param_groups, inner.param_groups
        self._last: list[dict[str, Any]] = []
        self.add()

    def add(self) -> None:
        self._last += [dict(settings) for settings in self._outer[len(self._last) :]]

    def hand_down(self) -> None:
        for mine, inner, last in zip(self._outer, self._inner, self._last, strict=True):
            changed = {key: value for key, value in mine.items() if key not in last or not _is_same(value, last[key])}
            inner.update({key: value for key, value in changed.items() if key != PARAMS})
            for key in last.keys() - mine.keys():
                inner.pop(key, None)

    def take_up(self) -> None:
        for mine, inner in zip(self._outer, self._inner, strict=True):
            mine.update({key: value for key, value in inner.items() if key != PARAMS})
        self._last = [dict(settings) for settings in self._outer]

    def agree(self, group: Group, name: str) -> None:
        """Compare what the ranks' inner optimizers keep in their groups; a collective, before `take_up`.

        Each rank's optimizer sees its own tensors only. A number that it computes over all of them, as Prodigy its
        distance, then differs: InputError on every rank. A rank without params in a group takes the others' numbers.
        """
        own = [_numbers(settings) if settings[PARAMS] else None for settings in self._inner]
        by_rank = gather_json(group, own)
        for place, settings in enumerate(self._inner):
            held = [(rank, numbers[place]) for rank, numbers in enumerate(by_rank) if numbers[place] is not None]
            for key in dict.fromkeys(key for _, numbers in held for key in numbers):
                _refuse_difference(name, key, [(rank, numbers.get(key)) for rank, numbers in held])
                if not settings[PARAMS]:
                    settings[key] = held[0][1].get(key)


def _numbers(settings: dict[str, Any]) -> dict[str, float | int | bool | str | None]:
    """The plain values of a group; tensors are not compared."""
    return {key: value for key, value in settings.items() if value is None or isinstance(value, int | float | str)}


def _refuse_difference(name: str, key: str, values: Iterable[tuple[int, Any]]) -> None:
    (first_rank, first), *others = values
    for rank, value in others:
        if value != first and not (_is_number(value) and _is_number(first) and _is_close(value, first)):
            raise InputError(
                f"{name} cannot be sharded: it keeps {key!r} in its param groups, and each rank computes another value "
                f"from its own tensors ({first} on rank {first_rank}, {value} on rank {rank}); use strategy="
                "'ddp-bucketed', where every rank has all gradients"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _is_close(value: float, other: float) -> bool:
    """Up to how kinds of devices round; NaN is as good as NaN."""
    return math.isclose(value, other, rel_tol=1e-5) or (math.isnan(value) and math.isnan(other))


def _is_same(value: Any, last: Any) -> bool:
    """A tensor that was changed in place is shared by both sides, so only another object counts."""
    if value is last:
        return True
    if isinstance(value, Tensor) or isinstance(last, Tensor) or type(value) is not type(last):
        return False
    return bool(value == last)
