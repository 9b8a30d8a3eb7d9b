"""Several optimizers in a loop of the user's own (a GAN): each is stepped when the user says so, in any order.

Made by api/loop.py in place of the EagerStep. A slot then has any number of updates: `backward_for` adds gradients of
one optimizer's params and no others, `update_for` sums them over the ranks and steps that optimizer.

[Note: several updates] In the exact policies a rank without samples in a slot runs none of the user's code, and must
still take part in every update. So each update, and the end of the slot, begins with a small exchange that names it;
a rank without samples follows what the others name. The slot's statistics travel in the exchange at its end.

[Note: lost between updates] Where a rank is lost after some of a slot's updates, those are the slot's step: it counts
as trained, and what would have followed is left out on all ranks (`updates_so_far`, train/settle.py).
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from uneven.comm.gather import gather_rows
from uneven.comm.group import Group
from uneven.data.tensors import Batch
from uneven.errors import InputError, RankError
from uneven.parallel.buckets import UNLIMITED
from uneven.parallel.reducer import Reducer
from uneven.step.eager import DerivedStep, EagerStep, Rows, Stats
from uneven.step.finite import Fault, OwnCheck, largest_of, losses_of, total_count

# What a rank names in an exchange; _FIRST + place is an update.
_ABSENT = 0
_END = 1
_FIRST = 2


class RankLeftError(Exception):
    """Another rank left the slot (a break, skip_rest, finish) where this one updates; `rows` are all statistics."""

    def __init__(self, rows: list[list[float]]) -> None:
        super().__init__("a rank left the slot")
        self.rows = rows


class OptimizerGroup(Optimizer):
    """Several optimizers as one, for schedules, for averages and for the saved state. `members` by name.

    Its param groups are the members' own, so that a learning rate written here is theirs.
    """

    def __init__(self, members: Mapping[str, Optimizer]) -> None:
        self.members = dict(members)
        groups = [settings for member in members.values() for settings in member.param_groups]
        params = [param for settings in groups for param in settings["params"]]
        if len(set(params)) != len(params):
            raise InputError(f"the optimizers {', '.join(members)} share params; give each its own")
        super().__init__([{"params": params}], {})
        self.param_groups = groups
        self.state = _MergedState(self.members)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for member in self.members.values():
            member.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for member in self.members.values():
            member.zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Each member takes its own part: the base class would replace the groups and state that they share."""
        groups = list(state_dict["param_groups"])
        for member, state in self.divide(state_dict["state"]):
            own = [groups.pop(0) for _ in member.param_groups]
            first = min((place for settings in own for place in settings["params"]), default=0)
            placed = [{**g, "params": [place - first for place in g["params"]]} for g in own]
            member.load_state_dict({"state": state, "param_groups": placed})
        self.param_groups = [settings for member in self.members.values() for settings in member.param_groups]

    def divide(self, state: Mapping[int, Any]) -> Iterator[tuple[Optimizer, dict[int, Any]]]:
        """Each member with its part of the state of all params, by its own places."""
        first = 0
        for member in self.members.values():
            stop = first + sum(len(settings["params"]) for settings in member.param_groups)
            yield member, {place - first: values for place, values in state.items() if first <= place < stop}
            first = stop

    def name_of(self, optimizer: Any) -> str:
        """The member that the user means: its name, its place, or the optimizer itself."""
        for place, (name, member) in enumerate(self.members.items()):
            if optimizer is member or (isinstance(optimizer, str) and optimizer == name):
                return name
            if isinstance(optimizer, int) and not isinstance(optimizer, bool) and optimizer == place:
                return name
        what = type(optimizer).__name__ if isinstance(optimizer, Optimizer) else repr(optimizer)
        raise InputError(f"optimizer={what} is none of this loop's; pass one of {', '.join(self.members)}")


class _MergedState(MutableMapping[Tensor, Any]):
    """The states of several optimizers as one mapping from params."""

    def __init__(self, members: Mapping[str, Optimizer]) -> None:
        self._members = list(members.values())  # not their states, which are others when they have loaded one
        self._owner = {
            param: member
            for member in members.values()
            for settings in member.param_groups
            for param in settings["params"]
        }

    def __getitem__(self, param: Tensor) -> Any:
        state = self._owner[param].state
        if param not in state:
            raise KeyError(param)
        return state[param]

    def __setitem__(self, param: Tensor, value: Any) -> None:
        self._owner[param].state[param] = value

    def __delitem__(self, param: Tensor) -> None:
        del self._owner[param].state[param]

    def __iter__(self) -> Iterator[Tensor]:
        return (param for member in self._members for param in member.state)

    def __len__(self) -> int:
        return sum(len(member.state) for member in self._members)


class SeveralSteps(DerivedStep):
    """Life cycle: as EagerStep; in an exact policy on several ranks `connect` once, when the group has formed."""

    def __init__(self, eager: EagerStep, optimizers: OptimizerGroup) -> None:
        super().__init__(eager)
        self.optimizer = self.optimizers = optimizers
        self._params: dict[str, list[nn.Parameter]] = {
            name: [p for settings in member.param_groups for p in settings["params"] if p.requires_grad]
            for name, member in optimizers.members.items()
        }
        self._begun: set[str] = set()  # members with gradients of this slot that are not used yet
        self._counts: dict[str, Tensor] = {}
        self._losses: list[tuple[float, float]] = []  # of every rank's meter, by the slot's last update
        self._group: Group | None = None
        self._rank = 0
        self._reducers: dict[str, Reducer] = {}

    def connect(
        self,
        group: Group,
        num_stats: int,
        is_leaving: Callable[[Sequence[float]], bool],
        enter: Callable[[Any], object],
    ) -> None:
        """`is_leaving(row)`: whether a rank's statistics say that it leaves the slot; `enter(state)` records time."""
        self._group, self._rank = group, group.rank
        self._num_stats = num_stats
        self._is_leaving = is_leaving
        self._enter = enter
        self._reducers = {
            name: Reducer(params, group, UNLIMITED, overlap=False, num_stats=len(OwnCheck._fields))
            for name, params in self._params.items()
        }

    def backward_for(self, name: str, result: Any, samples: int, slot_samples: int) -> None:
        """Add the gradients of a loss to this optimizer's params, and to no others."""
        if self.fault_so_far is not None:
            return
        if name not in self._begun:
            self._begun.add(name)
            self._zero(name)
        loss, count = self.weigh(result, samples, slot_samples)
        self.precision.scaler.scale(loss).backward(inputs=self._params[name])
        if count is not None:
            self._counts[name] = self._counts[name] + count if name in self._counts else count

    def update_for(self, name: str) -> None:
        """Step this optimizer by the gradients of all ranks; not in a slot that was not finite in an earlier update."""
        if self.fault_so_far is not None:
            return
        if self._group is not None:
            place = list(self._params).index(name)
            rows = self._exchange(_FIRST + place, [0.0] * self._num_stats)
            if any(map(self._is_leaving, rows)):
                raise RankLeftError(rows)
        self._sum_and_update(name)

    def __call__(self, batches: Sequence[tuple[Batch, int]], slot_samples: int) -> Fault | None:
        """The end of a slot on a rank that steps by itself: its updates are done, or were not finite."""
        del batches, slot_samples
        return self.update([])

    def forward_backward(
        self, batches: Sequence[tuple[Batch, int]], slot_samples: int, stats: Stats
    ) -> tuple[Rows, list[OwnCheck]]:
        """The end of a slot: exchange statistics; a rank without samples takes part in the others' updates first."""
        del slot_samples
        if not self._has_begun:
            self.begin()
        own = list(stats())
        while True:
            rows = self._exchange(_END if batches else _ABSENT, own)
            named = self._named - {_ABSENT, _END}
            if not named or any(map(self._is_leaving, rows)):
                return rows, []
            name = self._name(named.pop())
            self._zero(name)
            self._sum_and_update(name)

    def update(self, checks: Sequence[OwnCheck]) -> Fault | None:
        """The end of a slot, whose updates are done; returns why one of them was skipped, with all that followed."""
        del checks
        fault, self.fault_so_far = self.fault_so_far, None
        if fault is None and self._losses:
            self.meter.learn(self._losses)
        self._has_begun = False
        self.cancel()
        return fault

    def end_update(self) -> None:
        """[Note: lost between updates]. Of the losses those count that were in the sums, on every rank alike."""
        super().end_update()
        if self._losses:
            self.meter.learn(self._losses)
            self.meter.restore(self._losses[self._rank])

    def cancel(self) -> None:
        super().cancel()
        self._begun.clear()
        self._counts.clear()
        self._losses = []
        self.updates_so_far, self.fault_so_far = 0, None

    def close(self) -> None:
        """The group is lost, or its work is done; a rank that is left alone steps by itself."""
        for name, reducer in self._reducers.items():
            reducer.close()
            for param in self._params[name]:
                param.grad = None  # a view of a bucket
        self._group, self._reducers = None, {}

    def _zero(self, name: str) -> None:
        if self._reducers:
            self._reducers[name].prepare()
        else:
            self.optimizers.members[name].zero_grad(set_to_none=True)

    def _sum_and_update(self, name: str) -> None:
        """[Note: steps that are not finite] in finite.py: here the rest of the slot is skipped, too."""
        self._begun.discard(name)
        counts = self._counts.pop(name, None)
        if self._reducers:
            reducer = self._reducers[name]
            self._enter("communication")
            rows = reducer.finalize(
                lambda: list(OwnCheck()), lambda: self.sent_check(counts, reducer.largest_gradient())
            )
            self._enter("compute")
            checks = [OwnCheck._make(row) for row in rows]
            self._losses = losses_of(checks)
        else:
            grads = [param.grad for param in self._params[name] if param.grad is not None]
            checks = [OwnCheck.from_row(self.own_check(counts, largest_of(grads)).tolist())]
        self.fault_so_far = self.fault_of(checks)
        if self.fault_so_far is not None:
            self.updates_so_far += 1
            self.skip()
            return
        total = total_count(checks)
        member = self.optimizers.members[name]
        self._prepare(member, self._params[name], None if total is None else torch.tensor(total, dtype=torch.float64))
        self.precision.step(member)
        self.updates_so_far += 1

    def _exchange(self, what: int, stats: Sequence[float]) -> list[list[float]]:
        """Name what this rank does next; returns every rank's statistics. RankError where ranks do different things."""
        assert self._group is not None, "called in exact policies on several ranks"
        self._enter("wait")
        rows = gather_rows(self._group, [float(what), *stats])
        self._enter("compute")
        codes = [int(row.pop(0)) for row in rows]
        self._named = set(codes)
        if len(self._named - {_ABSENT}) > 1 and not any(map(self._is_leaving, rows)):
            each = ", ".join(f"rank {rank} {self._describe(code)}" for rank, code in enumerate(codes))
            raise RankError(
                f"the ranks step different optimizers for one slot ({each}): every rank must make the same "
                "ddp.step(loss, optimizer=...) calls for a batch; decide by ddp.global_step, not by a count of batches"
            )
        return rows

    def _name(self, code: int) -> str:
        return list(self._params)[code - _FIRST]

    def _describe(self, code: int) -> str:
        return {_ABSENT: "has no samples", _END: "is done"}.get(code) or f"steps {self._name(code)!r}"
