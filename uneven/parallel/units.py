"""Units: parts of a model whose params are made whole together, and the fixed order in which that is done."""

from collections.abc import Sequence

import torch
from torch import nn

from uneven.comm.group import Group
from uneven.comm.work import Works
from uneven.parallel.pieces import by_kind
from uneven.parallel.shards import Shards


class Unit:
    """Params that are made whole together."""

    def __init__(
        self,
        name: str,
        params: Sequence[nn.Parameter],
        shares: Sequence[float],
        rank: int,
        compute_dtype: torch.dtype | None,
    ) -> None:
        self.name = name
        self.shards = [Shards(kind, shares, rank, compute_dtype) for kind in by_kind(params)]
        self.has_frozen = any(not param.requires_grad for param in params)
        self._works: list[Works] | None = None

    def start(self, group: Group) -> None:
        if self._works is None:
            self._works = [one.start(group) for one in self.shards]

    def wait(self) -> None:
        assert self._works is not None, "started before"
        for works in self._works:
            works.wait()

    def drop(self) -> None:
        if self._works is not None:
            self.wait()
            for one in self.shards:
                one.drop()
            self._works = None


class UnshardOrder:
    """Gathers along a fixed order: the root and all units for forward, then all but the last again for backward.

    Whatever a rank computes, it starts the same gathers in the same order as all others, one ahead of what it needs.
    """

    def __init__(self, units: Sequence[Unit], group: Group) -> None:
        self.units = units
        self._group = group
        self._last = len(units) - 1
        self._order = [*range(len(units)), *range(self._last - 1, 0, -1)]
        self._started = 0

    def enter(self, place: int, is_alone: bool) -> None:
        """Make a unit whole for forward; `is_alone`: no backward will follow."""
        self._advance(place, self._last if is_alone else len(self._order) - 1)

    def enter_back(self, place: int) -> None:
        """Make a unit whole for backward; the root and the last unit still are."""
        if 0 < place < self._last:
            self._advance(2 * self._last - place, len(self._order) - 1)

    def left(self, place: int, is_alone: bool) -> None:
        """Forward is through with a unit."""
        if place and (place < self._last or is_alone):
            self.units[place].drop()

    def follow(self) -> None:
        """Take part in the gathers of a step without computing anything."""
        for position, place in enumerate(self._order):
            self._advance(position, len(self._order) - 1)
            if place:
                self.units[place].drop()

    def end(self, is_alone: bool = False) -> None:
        """Forward without gradients, or backward, is over. What nobody needed is gathered in its turn; all goes."""
        while not is_alone and self._started < len(self._order):
            self._start_next()
        self.reset()

    def reset(self) -> None:
        self._started = 0
        for unit in self.units:
            unit.drop()

    def _advance(self, position: int, last: int) -> None:
        while self._started <= min(position + 1, last):
            self._start_next()
        self.units[self._order[position]].wait()

    def _start_next(self) -> None:
        self.units[self._order[self._started]].start(self._group)
        self._started += 1


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The members of the model's lists and sequences of modules; of a model without any, its children.

    Of nested ones the outer; those that have params.
    """
    lists = [one for one in model.modules() if isinstance(one, nn.ModuleList | nn.Sequential) and one is not model]
    inner = {id(part) for one in lists for part in one.modules() if part is not one}
    outer = [one for one in lists if id(one) not in inner]
    found = [block for one in outer for block in one] if outer else list(model.children())
    return [block for block in found if next(block.parameters(), None) is not None]


def members(model: nn.Module, chosen: Sequence[nn.Module]) -> list[tuple[str, list[nn.Parameter]]]:
    """Names and params of the root and of every chosen module; a param that several of them use is the root's."""
    home: dict[int, int] = {}
    for number, unit in enumerate(chosen, 1):
        for part in unit.modules():
            if home.setdefault(id(part), number) != number:
                raise ValueError(f"units may not share modules, as these do: {type(part).__name__}")
    names = {id(module): name for name, module in model.named_modules()}
    owners: dict[nn.Parameter, set[int]] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            owners.setdefault(param, set()).add(home.get(id(module), 0))
    params: list[list[nn.Parameter]] = [[] for _ in range(len(chosen) + 1)]
    for param, numbers in owners.items():
        params[numbers.pop() if len(numbers) == 1 else 0].append(param)
    return list(zip(["the root", *(names[id(unit)] for unit in chosen)], params, strict=True))
