"""MuonAdamW: Muon for the matrices of a model, AdamW for the rest; the same class on one rank and on many.

Each rank owns part of the work: whole matrices for Muon, shared by speed, because orthogonalising them takes the time;
elements for AdamW, shared by memory. A step has three phases: start to reduce all gradients; group by group, wait for
the sums, update this rank's shards and start to send them; wait for everything sent. So communication of one group
overlaps with the update of another.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from uneven.comm.group import Group, SoloGroup
from uneven.comm.torch_group import AnyGroup, as_group
from uneven.errors import InputError, MachineError
from uneven.parallel.ddp import Replicated
from uneven.parallel.flat_shards import FlatShards, checked_shares, group_by_kind
from uneven.parallel.sharded_optimizer import ShardedOptimizer, call_closure
from uneven.parallel.sharded_reducer import DeferredShardedReducer, clip_shards
from uneven.parallel.survivors import CanSurvive
from uneven.policy.redundancy import Copies

KINDS = ("muon", "adamw")


class MuonAdamW(Optimizer):
    """Param groups name their kind: `[{"params": matrices, "kind": "muon", "lr": 0.02}, {"params": rest, "kind":
    "adamw"}]`; their other settings are those of torch.optim.Muon and AdamW.

    Made without a group it is one rank's, and `fit` spreads it over the run's ranks. `sums_gradients=False` is for
    gradients that a DDP has summed; otherwise each rank's own, divided by the sample count of all ranks, are summed
    here. `memory` and `speed` are the ranks' shares. `state_dict()` is a collective, and its result does not depend on
    the number of ranks.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        group: AnyGroup = None,
        *,
        memory: Sequence[float] | None = None,
        speed: Sequence[float] | None = None,
        sums_gradients: bool = True,
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise MachineError(f"MuonAdamW needs torch 2.9 or newer, this is {torch.__version__}")
        self._is_initialized = False
        self._given = [{**settings, "params": list(settings["params"])} for settings in map(_checked, groups)]
        self._group: Group = SoloGroup() if group is None else as_group(group)
        self._memory, self._speed = memory, speed
        self._sums_gradients = sums_gradients
        self._sources: list[DeferredShardedReducer] = []
        self._parts = [self._make_part(settings) for settings in self._given]
        # The parts' own groups, not copies, so that a scheduler changes the parts' settings.
        super().__init__([inner for part in self._parts for inner in part.param_groups], {})
        self._is_initialized = True

    def over(
        self,
        group: AnyGroup,
        *,
        memory: Sequence[float] | None = None,
        speed: Sequence[float] | None = None,
        sums_gradients: bool = True,
    ) -> "MuonAdamW":
        """A new one with the same params and settings as this one was made with, over the ranks of a group."""
        return MuonAdamW(self._given, as_group(group), memory=memory, speed=speed, sums_gradients=sums_gradients)

    @property
    def inner_optimizers(self) -> Sequence[Optimizer]:
        """One ShardedOptimizer for each group of params."""
        return self._parts

    @property
    def sums_gradients(self) -> bool:
        """Whether its step sums gradients over ranks: nobody else may have done so before."""
        return self._sums_gradients and self._group.world_size > 1

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """With a kind, as those it was made with; all ranks add the same ones."""
        if self._is_initialized:
            part = self._make_part(_checked(param_group))
            part.updates = self.updates
            super().add_param_group(part.param_groups[0])
            self._parts.append(part)
        else:
            super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = call_closure(closure)
        self.start()
        sent = [works for part in self._parts for works in part.update()]
        for works in sent:
            works.wait()
        return loss

    def start(self) -> None:
        """The first phase: start to sum all gradients. `step` does it too, where it was not done before."""
        for part in self._parts:
            part.start()

    def sum_outside(self, params: Sequence[nn.Parameter]) -> DeferredShardedReducer | None:
        """What sums the gradients of params that it does not hold, over the same ranks; for `clip`."""
        kinds = group_by_kind(params)
        shards = [FlatShards(kind, checked_shares(None, self._group), by_tensors=False) for kind in kinds]
        return DeferredShardedReducer(shards, self._group) if shards else None

    @torch.no_grad()
    def clip(self, max_norm: float, outside: DeferredShardedReducer | None = None) -> Tensor:
        """Scale the summed gradients to this norm over all params at most; returns the norm before. A collective.

        `outside`: of params that count in the norm, too (`sum_outside`).
        """
        if not self._sums_gradients:
            params = [param for settings in self.param_groups for param in settings["params"]]
            return nn.utils.clip_grad_norm_(params, max_norm)
        self.start()
        sums = [own for source in self._sources for own in source.own_sums()]
        if outside is not None:
            outside.start()
            sums += outside.own_sums()
            outside.finish()
        return clip_shards(sums, self._group, max_norm, self.param_groups[0]["params"][0].device)

    def full_gradients(self) -> dict[nn.Parameter, Tensor | None]:
        """Every param's whole summed gradient on every rank. A collective, between backward and step."""
        assert self._sums_gradients, "a DDP has them in .grad"
        self.start()
        sources = zip(self._parts, self._sources, strict=True)
        return {param: grad for part, source in sources for param, grad in source.full_gradients(part.flat_shards)}

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self._parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return _joined(part.state_dict() for part in self._parts)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = list(state_dict["param_groups"])
        first = 0
        for part in self._parts:
            own = [groups.pop(0) for _ in part.param_groups]
            stop = first + sum(len(settings["params"]) for settings in own)
            state = {place - first: v for place, v in state_dict["state"].items() if first <= place < stop}
            part.load_state_dict({"state": state, "param_groups": own})
            first = stop

    # For CanSurvive, which takes it for one ShardedOptimizer without copies.

    @property
    def copies(self) -> Copies | None:
        return None

    @property
    def flat_shards(self) -> list[FlatShards]:
        return [shards for part in self._parts for shards in part.flat_shards]

    @property
    def updates(self) -> int:
        """The steps that this rank has applied to all that it owns."""
        return min((part.updates for part in self._parts), default=0)

    def catch_up(self, group: Group) -> bool:
        """Whether all survivors are at the same step, with every part of it; a collective."""
        are_level = [part.catch_up(group) for part in self._parts]  # of all parts, on all ranks
        return all(are_level) and all(part.updates == self.updates for part in self._parts)

    def surviving_state(self, group: Group, handed_in: Sequence[int]) -> dict[str, Any]:
        """See ShardedOptimizer."""
        return _joined(part.surviving_state(group, handed_in) for part in self._parts)

    def release(self) -> None:
        for part in self._parts:
            part.release()

    def _make_part(self, settings: dict[str, Any]) -> ShardedOptimizer:
        settings = dict(settings)
        is_muon, params = settings.pop("kind") == "muon", settings.pop("params")
        plain: Optimizer = (torch.optim.Muon if is_muon else AdamW)(params, **settings)
        shares = self._speed if is_muon else self._memory
        part = ShardedOptimizer(plain, self._group, shares=shares, by_tensors=is_muon)
        if self._sums_gradients:
            self._sources.append(DeferredShardedReducer(part.flat_shards, self._group))
            part.take_gradients_from(self._sources[-1])
        return part


def _joined(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The states of the parts, one after the other, as that of one optimizer."""
    state: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    first = 0
    for own in states:
        state |= {first + place: values for place, values in own["state"].items()}
        groups += [{**g, "params": [first + place for place in g["params"]]} for g in own["param_groups"]]
        first += sum(len(g["params"]) for g in own["param_groups"])
    return {"state": state, "param_groups": groups}


def _checked(settings: dict[str, Any]) -> dict[str, Any]:
    """The group with its params as a list; InputError where it has no kind, or Muon something else than matrices."""
    if not isinstance(settings, dict) or "params" not in settings:
        raise InputError(
            "MuonAdamW takes groups of params, each with its kind, as in [{'params': matrices, 'kind': 'muon'}, "
            f"{{'params': rest, 'kind': 'adamw'}}], got {type(settings).__name__}"
        )
    kind, params = settings.get("kind"), list(settings["params"])
    if kind not in KINDS:
        raise InputError(f"kind {kind!r} of a group of params must be one of {', '.join(KINDS)}")
    for param in params:
        if kind == "muon" and param.dim() != 2:
            raise InputError(f"Muon is for matrices, not for a param of shape {tuple(param.shape)}: use kind adamw")
    return {**settings, "params": params}


class ThreePhase(CanSurvive):
    """The strategy of a MuonAdamW that sums gradients itself when it steps: forward and backward send nothing.

    Used by `fit`; made when all ranks hold the same params. A param without a gradient is summed as zeros, so a rank
    without samples has nothing to do in place of backward.
    """

    def __init__(self, model: nn.Module, optimizer: MuonAdamW) -> None:
        self.module = model
        self._optimizer = self._muon = self._sharded = optimizer
        held = {param for settings in optimizer.param_groups for param in settings["params"]}
        outside = [param for param in model.parameters() if param.requires_grad and param not in held]
        self._outside = optimizer.sum_outside(outside)  # they count in the norm, as in one process

    def clip(self, max_norm: float) -> Tensor:
        return self._muon.clip(max_norm, self._outside)

    def full_gradients(self) -> dict[str, Tensor | None]:
        found = self._muon.full_gradients()
        return {name: found.get(param) for name, param in self.module.named_parameters()}


class AfterReducer(CanSurvive):
    """The strategy of a MuonAdamW that updates and sends what a DDP has summed."""

    def __init__(self, summed: Replicated, optimizer: MuonAdamW) -> None:
        self.module = summed.module
        self._optimizer = self._sharded = optimizer
        self._summed = summed

    def close(self) -> None:
        self._summed.close()
