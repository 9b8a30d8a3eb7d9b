"""FSDP units: parts of a model whose params are unsharded together, and the one order of a step's collectives."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from uneven.comm.group import Group
from uneven.comm.work import WorkList
from uneven.errors import InputError
from uneven.parallel.flat_shards import FlatShards, ReshardableShards, group_by_kind
from uneven.parallel.sharded_reducer import ShardedReducer
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
        self.trained = [shards for shards in self.flat_shards if shards.params[0].requires_grad]
        self.has_frozen = len(self.trained) < len(self.flat_shards)
        self._unfinished: set[FlatShards] = set()  # trained ones whose gradients are not there yet
        self._awaited: weakref.WeakSet[_Input] = weakref.WeakSet()  # an input goes with its graph
        self._stays = False
        self._works: list[WorkList] | None = None
        self._is_here = False

    @property
    def is_here(self) -> bool:
        """Whether its params are whole, and not only on their way."""
        return self._is_here

    def begin_forward(self) -> None:
        """Its backward has all of its gradients before it."""
        self._unfinished = set(self.trained)

    def watch_inputs(self, inputs: Iterable[Tensor], done: Callable[[], None]) -> None:
        """Frozen params are needed until backward has the gradients of the inputs of every forward: then call `done`.

        Without an input that gets one nothing tells, and they stay until backward ends.
        """
        watched = [value for value in inputs if value.requires_grad]
        self._stays |= not watched
        for value in watched:
            input_ = _Input()
            self._awaited.add(input_)
            value.register_hook(partial(self._input_done, input_, done))

    def _input_done(self, input_: "_Input", done: Callable[[], None], grad: Tensor) -> None:
        del grad
        self._awaited.discard(input_)
        done()

    def gradients_done(self, shards: FlatShards) -> None:
        self._unfinished.discard(shards)

    @property
    def is_done(self) -> bool:
        """Whether backward needs its params no more."""
        return not (self._unfinished or self._awaited or self._stays)

    def end_backward(self) -> None:
        self._awaited.clear()
        self._stays = False

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


class _Input:
    """One input of a unit in one forward; the hook for its gradient holds it."""


class UnshardOrder:
    """The order of a step's all-gathers: the root and all units for forward, then all units but the last again for
    backward, one unit ahead of what is needed (prefetch). The reducer's buckets have their places among them.

    Units without trained params that backward does not come to, as those below the first adapter, are left out of it
    from the second backward on: whether it does is seen in the first one in which every rank has had samples, and all
    ranks hear of it with the flags of the reducer. If backward comes to such a unit after all (an input has a gradient
    for once), its output says so in forward, and the unit stays whole from then on until its backward.

    [Note: order of a step] Every rank starts all collectives of a step in one order, whatever its samples need: the
    buckets of a unit are sent after `due` of the all-gathers and before the next one. A rank that needs that one
    earlier sends the buckets as they are; what comes too late for them is summed at the end of backward, and from then
    on the unit is due later, on all ranks. Nobody waits for a collective before it has started all earlier ones, so
    none waits for ever. In free orders a rank without samples, or one that does not use a param, would wait for an
    all-gather while another one waits for its sums.
    """

    def __init__(self, units: Sequence[Unit], reducer: ShardedReducer) -> None:
        self.units = units
        self._last = len(units) - 1
        self.due: dict[FlatShards, int] = {}
        self._gather_for_backward(range(self._last - 1, 0, -1))
        self.started = 0
        self.is_over = False  # the backward of the last forward
        self._came_to = [False] * len(units)  # on this rank, in any backward so far
        self._has_had_samples = False
        self._reducer = reducer
        reducer.follow(self)

    def _gather_for_backward(self, places: Iterable[int]) -> None:
        """Gather these units for backward, in this order. Every rank decides so at the same step."""
        forward = len(self.units)
        self._order = [*range(forward), *places]
        self._backward_at = {place: at for at, place in enumerate(self._order[forward:], forward)}
        # Backward of a unit begins when the one before it in the model has been prefetched.
        for place, unit in enumerate(self.units):
            begins = self._last if place == self._last else self._backward_at.get(place, len(self._order))
            self.due |= dict.fromkeys(unit.flat_shards, min(begins + 2, len(self._order)))

    @property
    def flags(self) -> list[float]:
        """What ranks tell each other at the end of a backward, of which everybody hears the largest."""
        return [float(not self._has_had_samples), *map(float, self._came_to)]

    def hear(self, flags: Sequence[float]) -> None:
        if flags[0]:
            return
        kept = [place for place, unit in enumerate(self.units) if flags[1 + place] or unit.trained]
        if left_out := self._backward_at.keys() - set(kept):
            self._gather_for_backward([place for place in self._order[len(self.units) :] if place not in left_out])

    def begin(self) -> None:
        """Begin a step; the last forward may have had no backward, or one that failed."""
        self.reset()
        self._reducer.reset()
        self.is_over = False
        for unit in self.units:
            unit.begin_forward()

    def pre_forward(self, place: int, forward_only: bool) -> None:
        """Unshard a unit for forward; `forward_only`: no backward follows, so nothing is prefetched for one."""
        self._advance(place, self._last if forward_only else len(self._order) - 1)

    def pre_backward(self, place: int) -> None:
        """Unshard a unit for backward; the root, the last unit and one that was left out and stayed still are."""
        self._has_had_samples = True
        self._came_to[place] = True
        if place in self._backward_at:
            self._advance(self._backward_at[place], len(self._order) - 1)
        elif not self.units[place].is_here:
            raise InputError(
                f"strategy='fsdp': a checkpoint recomputes {self.units[place].name}, which no backward needed before; "
                "put a checkpoint around each block alone, or use strategy='zero2'"
            )

    def post_forward(self, place: int, *, forward_only: bool, has_backward: bool) -> None:
        """Reshard a unit after its forward; the root and the last unit stay for backward."""
        stays = place == self._last or (has_backward and place not in self._backward_at)
        if place and (forward_only or not stays):
            self.units[place].reshard()

    def finish(self) -> None:
        """End a step: take part in the collectives that this rank did not need, without samples in all of them."""
        while self.started < len(self._order):
            self._start_next()
            if self.started > 1 and (before := self._order[self.started - 2]):
                self.units[before].reshard()
        self.reset()
        for unit in self.units:
            unit.end_backward()
        self.is_over = True

    def reset(self) -> None:
        self.started = 0
        for unit in self.units:
            unit.reshard()

    def _advance(self, position: int, last: int) -> None:
        while self.started <= position:
            self._start_next()
        # Ahead of need nothing is sent before it is whole.
        if self.started == position + 1 <= last and self._reducer.has_sent_before(self.started):
            self._start_next()
        self.units[self._order[position]].wait()

    def _start_next(self) -> None:
        self._reducer.send_before(self.started)
        self.units[self._order[self.started]].start_unshard()
        self.started += 1
        self._reducer.send_ready()


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
