"""FSDP units: parts of a model whose params are unsharded together, and the fixed order in which all ranks do so."""

from collections.abc import Sequence

import torch
from torch import nn

from uneven.comm.group import Group
from uneven.comm.work import WorkList
from uneven.errors import InputError
from uneven.parallel.flat_shards import ReshardableShards, group_by_kind
from uneven.policy.redundancy import Copies


class Unit:
    """Params that are unsharded and resharded together."""

    def __init__(
        self,
        name: str,
        params: Sequence[nn.Parameter],
        shares: Sequence[float],
        group: Group,
        compute_dtype: torch.dtype | None,
        copies: Copies | None = None,
    ) -> None:
        self.name = name
        self._group = group
        self.flat_shards = [
            ReshardableShards(kind, shares, group, compute_dtype, copies) for kind in group_by_kind(params)
        ]
        self.has_frozen = any(not param.requires_grad for param in params)
        self._works: list[WorkList] | None = None
        self._is_here = False

    @property
    def is_here(self) -> bool:
        """Whether its params are whole, and not only on their way."""
        return self._is_here

    def start_unshard(self) -> None:
        if self._works is None:
            self._works = [shards.unshard(self._group) for shards in self.flat_shards]

    def wait(self) -> None:
        assert self._works is not None, "start_unshard comes first"
        for works in self._works:
            works.wait()
        self._is_here = True

    def reshard(self) -> None:
        if self._works is not None:
            self.wait()
            for shards in self.flat_shards:
                shards.reshard()
            self._works = None
            self._is_here = False


class UnshardOrder:
    """The order of all-gathers: the root and all units for forward, then all units but the last again for backward.

    Invariant: every rank starts the same all-gathers in the same order, with or without samples, one unit ahead of what
    it needs (prefetch). Collectives in different orders would hang.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        self._last = len(units) - 1
        self._order = [*range(len(units)), *range(self._last - 1, 0, -1)]
        self._started = 0

    def pre_forward(self, place: int, forward_only: bool) -> None:
        """Unshard a unit for forward; `forward_only`: no backward follows, so nothing is prefetched for one."""
        self._advance(place, self._last if forward_only else len(self._order) - 1)

    def pre_backward(self, place: int) -> None:
        """Unshard a unit for backward; the root and the last unit still are."""
        if 0 < place < self._last:
            self._advance(2 * self._last - place, len(self._order) - 1)

    def post_forward(self, place: int, forward_only: bool) -> None:
        """Reshard a unit after its forward; the root and the last unit stay for backward."""
        if place and (place < self._last or forward_only):
            self.units[place].reshard()

    def run_without_samples(self) -> None:
        """Take part in the all-gathers of a step without computing anything."""
        for position, place in enumerate(self._order):
            self._advance(position, len(self._order) - 1)
            if place:
                self.units[place].reshard()

    def finish(self, forward_only: bool = False) -> None:
        """End a backward, or a forward without gradients. All-gathers that this rank did not need still take place."""
        while not forward_only and self._started < len(self._order):
            self._start_next()
        self.reset()

    def reset(self) -> None:
        self._started = 0
        for unit in self.units:
            unit.reshard()

    def _advance(self, position: int, last: int) -> None:
        while self._started <= min(position + 1, last):
            self._start_next()
        self.units[self._order[position]].wait()

    def _start_next(self) -> None:
        self.units[self._order[self._started]].start_unshard()
        self._started += 1


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The entries of the model's outermost ModuleLists and Sequentials that have params; without any, its children."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and m is not model]
    inner = {id(module) for container in lists for module in container.modules() if module is not container}
    outer = [container for container in lists if id(container) not in inner]
    blocks = [block for container in outer for block in container] if outer else list(model.children())
    return [block for block in blocks if next(block.parameters(), None) is not None]


def params_by_unit(model: nn.Module, chosen: Sequence[nn.Module]) -> list[tuple[str, list[nn.Parameter]]]:
    """Names and params of the root and of every chosen module; a param that several of them use belongs to the root."""
    unit_of: dict[int, int] = {}
    for number, unit in enumerate(chosen, 1):
        for module in unit.modules():
            if unit_of.setdefault(id(module), number) != number:
                raise InputError(
                    f"strategy='fsdp': two blocks contain the same {type(module).__name__}; take what holds both "
                    "(in fit by a method fsdp_units() of the model, else by units=) as one, or use strategy='zero2'"
                )
    names = {id(module): name for name, module in model.named_modules()}
    owners: dict[nn.Parameter, set[int]] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            owners.setdefault(param, set()).add(unit_of.get(id(module), 0))
    params: list[list[nn.Parameter]] = [[] for _ in range(len(chosen) + 1)]
    for param, numbers in owners.items():
        params[numbers.pop() if len(numbers) == 1 else 0].append(param)
    return list(zip(["the root", *(names[id(unit)] for unit in chosen)], params, strict=True))
