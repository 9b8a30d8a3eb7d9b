"""ShardedOptimizer (ZeRO-1): each rank keeps the optimizer state of its own shard of the params and updates that.

Gradients must be summed before (by any DDP) or come from a `GradientSource`; after the step every owner's params are
sent to all ranks. Shares may be unequal or zero: they divide bytes and are independent of the ranks' sample counts.
Params are cut by elements where the optimizer is known to treat each by itself, else whole tensors have owners.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from uneven.comm.gather import gather_rows
from uneven.comm.group import Group
from uneven.comm.torch_group import AnyGroup, as_group
from uneven.comm.work import WorkList
from uneven.errors import InputError
from uneven.parallel.buckets import view_like
from uneven.parallel.elementwise import is_elementwise, is_known, refuse_by_elements, refuse_joined
from uneven.parallel.flat_shards import FlatShards, Shard, checked_shares, gradient_like, group_by_kind, ranks_held
from uneven.parallel.optimizer_state import GroupSettings, gather_state, shard_state
from uneven.parallel.strategy import on_host
from uneven.policy.redundancy import Copies

Held = dict[nn.Parameter, tuple[Shard, nn.Parameter]]  # a rank's shards, and what the inner optimizer updates


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
    def add(self, flat_shards: Sequence[FlatShards]) -> None:
        """The optimizer has taken more params."""
        ...


class ShardedOptimizer(Optimizer):
    """Takes the place of the optimizer it is made from, also for schedulers: `param_groups` has all params.

    `group` is a torch process group or one of ours; None is torch's default group. `by_tensors` gives every param to
    one owner; None decides by the optimizer (see elementwise.py). `state_dict()` is a collective: all ranks call it,
    and each gets the state that the plain optimizer would have; `consolidate_state_dict` gathers it for one rank.
    `updates` counts the steps that this rank has applied.

    [Note: one step apart]
    With `copies` each rank updates the shard that it keeps for another one as that one does, by the same summed
    gradients: no state is sent, and a copy is of the same step as its owner's. Before anybody updates, all ranks meet
    in a collective of one number, with their gradients summed and clipped. So when ranks are lost, survivors are at
    most one update apart, and those behind have everything in hand to apply it (`catch_up`).
    """

    def __init__(
        self,
        optimizer: Optimizer,
        group: AnyGroup = None,
        *,
        shares: Sequence[float] | None = None,
        by_tensors: bool | None = None,
        flat_shards: Sequence[FlatShards] | None = None,  # if the params are sharded already
        copies: Copies | None = None,
    ) -> None:
        refuse_joined(optimizer)
        if by_tensors is False or flat_shards is not None:
            refuse_by_elements(optimizer, "by_tensors=False")
        self._group = as_group(group)
        self._inner: Optimizer | None = None
        self._source: GradientSource | None = None
        self._consolidated: tuple[int, dict[str, Any] | None] | None = None  # (rank that has it, the state)
        self.copies = copies
        self.updates = 0
        self._is_unfinished = False  # an update is applied, and the inner settings are not yet taken up
        self._waiting: tuple[dict[str, Any], list[Tensor | None]] | None = None  # of a step that is not yet applied
        super().__init__([dict(settings) for settings in optimizer.param_groups], dict(optimizer.defaults))
        self.by_tensors = (
            not (is_elementwise(optimizer) or flat_shards is not None) if by_tensors is None else by_tensors
        )
        self._shares = checked_shares(shares, self._group)
        self._is_fixed = flat_shards is not None
        self._compares_settings = self._group.world_size > 1 and not is_known(optimizer)
        self._takes_closure = "closure" in inspect.signature(optimizer.step).parameters
        before: dict[Any, dict[str, Any]] = {param: dict(state) for param, state in optimizer.state.items()}
        optimizer.state.clear()
        self.flat_shards: list[FlatShards] = [] if flat_shards is None else list(flat_shards)
        if flat_shards is None:
            self.flat_shards += self._sharded(self._all_params())
        self._held: list[Held] = [{} for _ in ranks_held(self._group.rank, copies)]  # its own shards come first
        self._sharded_params: set[nn.Parameter] = set()
        self._take(self.flat_shards)
        self._given = [dict(settings) for settings in optimizer.param_groups]
        for settings in optimizer.param_groups:
            settings["params"] = self._optimized(settings["params"])
        self._inner = optimizer
        self._settings = GroupSettings(self, optimizer)
        for shard, optimized in self._all_held():
            if shard.param in before:  # an optimizer that makes its state at once, or that was trained before
                optimizer.state[optimized] = shard_state(before[shard.param], shard, self.by_tensors)
        # Adagrad has a state for frozen params too. They are never updated: every rank keeps it whole.
        self._frozen_state = {param: state for param, state in before.items() if param not in self._sharded_params}

    @property
    def inner(self) -> Optimizer:
        """The optimizer of this rank's own shards."""
        assert self._inner is not None
        return self._inner

    @property
    def inner_optimizers(self) -> Sequence[Optimizer]:
        return [self.inner]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Later params are sharded by the same shares, by themselves; all ranks add the same ones.

        Where the strategy has sharded the model's params (FSDP), these alone can be added.
        """
        super().add_param_group(param_group)
        if self._inner is None:
            return
        settings = self.param_groups[-1]
        try:
            self._shard_more(settings["params"])
        except ValueError:
            self.param_groups.pop()
            raise
        self._inner.add_param_group({**settings, "params": self._optimized(settings["params"])})
        self._settings.add()

    @torch.no_grad()
    def step(self, closure: Any = None, **options: Any) -> Any:
        """`closure` is called once, before anything is updated; other keyword arguments go to the inner optimizer."""
        loss = None
        if callable(closure):
            loss = call_closure(closure)
            if self._takes_closure:
                options["closure"] = _replay(loss)
        elif closure is not None:
            options["closure"] = closure
        self.start()
        works = self.update(**options)
        for work in works:
            work.wait()
        return loss

    def start(self) -> None:
        """The first part of a step: start the collectives that gradients still need."""
        if self._source is not None:
            self._source.start()

    @torch.no_grad()
    def update(self, **options: Any) -> list[WorkList]:
        """The second part: update this rank's shards and start to send them to all ranks."""
        self._consolidated = None
        self._refuse_unsharded()
        self._settings.hand_down()
        # Held here, since whoever gives up an interrupted step detaches gradients from their params.
        self._waiting = options, [self._gradient_of(*held) for held in self._all_held()]
        if self.copies is not None:  # [Note: one step apart]
            self._group.all_reduce(torch.zeros(1)).wait()
        self._apply()
        if self._source is not None:
            self._source.finish()
        if self._compares_settings:
            self._settings.agree(self._group, type(self.inner).__name__)
        self._settings.take_up()
        self._is_unfinished = False
        kept = ranks_held(self._group.rank, self.copies)[1:]
        return [shards.all_gather(self._group, kept) for shards in self.flat_shards]

    def _apply(self) -> None:
        """Update all shards that this rank holds, by gradients that are in its hands. No collective."""
        assert self._waiting is not None, "whoever is behind was in the step that another rank has applied"
        options, gradients = self._waiting
        for (_, optimized), grad in zip(self._all_held(), gradients, strict=True):
            optimized.grad = grad
        if any(self._held):  # an optimizer of the user's own need not expect to have no params
            self.inner.step(**options)
        for shard, optimized in self._all_held():
            if optimized is not shard.param or self._source is not None:
                optimized.grad = None
        self._waiting = None
        self.updates += 1
        self._is_unfinished = True

    def _gradient_of(self, shard: Shard, optimized: nn.Parameter) -> Tensor | None:
        """The summed gradient of a shard, as the inner optimizer takes it."""
        param = shard.param
        if self._source is not None:
            grad = self._source.gradient_of(shard)
            return grad if grad is None or optimized is not param else view_like(param, grad, 0)
        if optimized is param or param.grad is None:
            return param.grad
        return shard.of(gradient_like(param))

    @torch.no_grad()
    def catch_up(self, group: Group) -> bool:
        """After the loss of a rank, on all survivors in a group of theirs: apply a step that any of them has applied.

        [Note: one step apart]. Returns whether all are at the same step then, on all alike; without copies they may
        not be. Called again where a rank is lost meanwhile.
        """
        rows = gather_rows(group, [float(self.updates), float(self._is_unfinished)])
        newest = max(count for count, _ in rows)
        if self.copies is None:
            return all(row == [newest, 0.0] for row in rows)
        if self.updates < newest:
            self._apply()
        if self._compares_settings and any(row != [newest, 0.0] for row in rows):
            self._settings.agree(group, type(self.inner).__name__)
        if self._is_unfinished:  # else what a scheduler has set for the step after it would be lost
            self._settings.take_up()
            self._is_unfinished = False
        return True

    def surviving_state(self, group: Group, handed_in: Sequence[int]) -> dict[str, Any]:
        """The state of a plain optimizer, from what the ranks of `group` hold; `handed_in`: whose shards this rank
        hands in. A collective of the survivors, after `catch_up`.
        """
        return self._gathered_state(group, handed_in)

    def release(self) -> None:
        """Give the inner optimizer back as it was given, with whole params and without state; no collective.

        In a loop of the user's own the next strategy takes the same object.
        """
        for settings, given in zip(self.inner.param_groups, self._given, strict=False):
            settings.clear()
            settings.update(given)
        for settings, own in list(zip(self.inner.param_groups, self.param_groups, strict=True))[len(self._given) :]:
            settings["params"] = list(own["params"])
        self.inner.state.clear()

    def take_gradients_from(self, source: GradientSource) -> None:
        """From now on the source's gradients are used, not the params' own."""
        self._source = source

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._source is not None:
            self._source.zero()
        super().zero_grad(set_to_none)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the state for one rank: until the next step `state_dict()` is no collective, and that rank's alone."""
        full = self._gathered_state()
        self._consolidated = to, full if self._group.rank == to else None

    def state_dict(self) -> dict[str, Any]:
        if self._consolidated is None:
            return self._gathered_state()
        owner, full = self._consolidated
        if full is None:
            raise InputError(
                f"the state was gathered on rank {owner} by consolidate_state_dict(to={owner}), and this is rank "
                f"{self._group.rank}; without it state_dict() gives the state to every rank that calls it together"
            )
        return full

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state of a plain optimizer, or of any number of ranks; each rank keeps its own shard of it."""
        params = self._all_params()
        sizes = [len(settings["params"]) for settings in state_dict["param_groups"]]
        own_sizes = [len(settings["params"]) for settings in self.param_groups]
        if sizes != own_sizes:
            raise ValueError(f"the state has groups of {sizes} params, this optimizer has groups of {own_sizes}")
        self._consolidated = None
        for mine, theirs in zip(self.param_groups, state_dict["param_groups"], strict=True):
            mine.update({key: value for key, value in theirs.items() if key != "params"})
        self._settings.hand_down()
        self._settings.take_up()
        self.inner.state.clear()
        self._frozen_state.clear()
        for place, state in state_dict["state"].items():
            if params[int(place)] not in self._sharded_params:
                self._frozen_state[params[int(place)]] = on_host(state)
            for held in self._held:
                if (found := held.get(params[int(place)])) is not None:
                    shard, optimized = found
                    self.inner.state[optimized] = shard_state(state, shard, self.by_tensors)

    def _gathered_state(self, group: Group | None = None, handed_in: Sequence[int] | None = None) -> dict[str, Any]:
        places = {param: place for place, param in enumerate(self._all_params())}
        ranks = [self._group.rank] if handed_in is None else handed_in
        own: dict[int, list[tuple[Shard, dict[str, Any]]]] = {}
        for shard, optimized in self._all_held():
            if shard.param in places and shard.rank in ranks:
                state = dict(self.inner.state.get(optimized, {}))
                own.setdefault(places[shard.param], []).append((shard, state))
        groups = [
            {
                **{key: value for key, value in settings.items() if key != "params"},
                "params": [places[p] for p in settings["params"]],
            }
            for settings in self.param_groups
        ]
        full = gather_state(group or self._group, self._all_params(), own, self.by_tensors)
        full |= {places[param]: on_host(state) for param, state in self._frozen_state.items() if param in places}
        return {"state": dict(sorted(full.items())), "param_groups": groups}

    def _all_held(self) -> Iterator[tuple[Shard, nn.Parameter]]:
        """Every shard that this rank updates, with what the inner optimizer has in place of its param."""
        return (found for held in self._held for found in held.values())

    def _optimized(self, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        return [held[param][1] for held in self._held for param in params if param in held]

    def _all_params(self) -> list[nn.Parameter]:
        return [param for settings in self.param_groups for param in settings["params"]]

    def _sharded(self, params: Sequence[nn.Parameter]) -> list[FlatShards]:
        trained = [param for param in params if param.requires_grad]
        found: list[FlatShards] = []
        for kind in group_by_kind(trained):
            every = [*self.flat_shards, *found]
            held = [sum(one.bounds[rank + 1] - one.bounds[rank] for one in every) for rank in range(len(self._shares))]
            found.append(FlatShards(kind, self._shares, by_tensors=self.by_tensors, held=held))
        return found

    def _take(self, flat_shards: Sequence[FlatShards]) -> None:
        for shards in flat_shards:
            self._sharded_params.update(shards.params)
            for rank, held in zip(ranks_held(self._group.rank, self.copies), self._held, strict=True):
                for shard in shards.shards_of(rank):
                    held[shard.param] = shard, shards.optimized_param(shard)

    def _shard_more(self, params: Sequence[nn.Parameter]) -> None:
        new = [param for param in params if param not in self._sharded_params]
        if not new:
            return
        if self._is_fixed:
            raise InputError(
                f"add_param_group: a param of shape {tuple(new[0].shape)} was not trained when the strategy sharded "
                "the model; make the strategy again with all params that are to be trained"
            )
        more = self._sharded(new)
        self.flat_shards += more
        self._take(more)
        if self._source is not None:
            self._source.add(more)

    def _refuse_unsharded(self) -> None:
        """InputError for a param with a gradient that has no owner: it would silently never be updated."""
        if len(self._sharded_params) == sum(len(settings["params"]) for settings in self.param_groups):
            return
        for param in self._all_params():
            if param.grad is not None and param not in self._sharded_params:
                raise InputError(
                    f"a param of shape {tuple(param.shape)} has a gradient, but did not require one when the optimizer "
                    "was sharded; when params are unfrozen, make strategy and optimizer again"
                )


def call_closure(closure: Callable[[], Any] | None) -> Any:
    """The loss that a step's closure computes, if there is one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _replay(loss: Any) -> Callable[[], Any]:
    """A closure for the inner optimizer: the loss that is known already. A second call would need another forward."""
    calls = 0

    def closure() -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise InputError(
                "the optimizer runs its closure several times in a step, between updates that only this rank has made; "
                "use strategy='ddp-bucketed' for it"
            )
        return loss

    return closure
