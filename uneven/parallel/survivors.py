"""What survivors have of a sharded model when ranks are lost: all of it, from own shards and kept copies.

Called on all survivors, in a new group of theirs, and again where one of them is lost meanwhile. The old group is never
used. A strategy made anew for the survivors then loads the state, by the memory of who is left.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from uneven.comm.group import Group
from uneven.parallel.flat_shards import FlatShards, flat_memory
from uneven.parallel.strategy import FullState, Strategy, full_model_state, tensors_by_name
from uneven.policy.redundancy import Copies, holders


@dataclass(frozen=True)
class Survived:
    """The same state on every survivor, but for the model's buffers, which are each rank's own.

    `updates` counts the updates in it since the strategy was made: [Note: one step apart] in sharded_optimizer.py. A
    survivor whose own count was less when its interrupted step began finds that step applied; for one whose count was
    the same the step has not happened, and is redone.
    """

    state: FullState
    updates: int


class Sharded(Protocol):
    """An optimizer with its state in shards: a ShardedOptimizer, or a MuonAdamW, which has several."""

    @property
    def updates(self) -> int: ...
    @property
    def copies(self) -> Copies | None: ...
    @property
    def flat_shards(self) -> list[FlatShards]: ...
    def catch_up(self, group: Group) -> bool: ...
    def surviving_state(self, group: Group, handed_in: Sequence[int]) -> dict[str, Any]: ...
    def release(self) -> None: ...


class CanSurvive(Strategy):
    """A strategy with a sharded optimizer, whose shards can be put together without some of its ranks."""

    _sharded: Sharded

    @property
    def updates(self) -> int:
        """How many updates this rank has applied since the strategy was made."""
        return self._sharded.updates

    def surviving_state(self, group: Group, old_ranks: Sequence[int]) -> Survived | None:
        """The whole state from the ranks of `group`, which had these ranks when the strategy was made; a collective.

        None on all of them where a shard is lost for good: with its owner and its keeper, or without redundancy.
        """
        flat_shards = self._shards_to_survive()
        by_rank = holders(old_ranks, len(flat_shards[0].bounds) - 1, self._sharded.copies)
        lost = [rank for rank, holder in enumerate(by_rank) if holder is None]
        if any(shards.bounds[rank] < shards.bounds[rank + 1] for rank in lost for shards in flat_shards):
            return None
        if not self._sharded.catch_up(group):
            return None
        handed_in = [rank for rank, holder in enumerate(by_rank) if holder == old_ranks[group.rank]]
        gather = gatherer(flat_shards, group, handed_in)
        model = full_model_state(self.module, lambda param: gather(param).cpu())
        return Survived(FullState(model, self._sharded.surviving_state(group, handed_in)), self.updates)

    @torch.no_grad()
    def leave(self, state: FullState) -> None:
        """Give the model whole params of its own with these values, and the optimizer whole params without state;
        remove all hooks. No collective.
        """
        self._remove_hooks()
        self._sharded.release()
        for key, tensor in tensors_by_name(self.module, state.model).items():
            value = state.model[key]
            if isinstance(tensor, nn.Parameter):
                # New memory: a collective that was given up may still write into the old one.
                tensor.grad = None
                tensor.data = torch.empty_like(tensor, dtype=value.dtype).copy_(value)
            else:
                tensor.copy_(value)

    def _shards_to_survive(self) -> Sequence[FlatShards]:
        """All that are sharded, by elements or tensors; other params every rank has whole."""
        return self._sharded.flat_shards

    def _remove_hooks(self) -> None:
        self.close()


def gatherer(
    flat_shards: Sequence[FlatShards], group: Group, handed_in: Sequence[int]
) -> Callable[[nn.Parameter], Tensor]:
    """A function that makes a whole param, in the dtype it was made in; a collective, one param at a time.

    `handed_in`: whose shards this rank hands in; every shard is handed in by one rank.
    """
    shards_of = {param: shards for shards in flat_shards for param in shards.params}

    @torch.no_grad()
    def gather(param: nn.Parameter) -> Tensor:
        if param not in shards_of:  # frozen, and so whole and the same on every rank
            return param.detach().clone()
        shards = shards_of[param]
        full = torch.zeros_like(param, dtype=shards.reduce_dtype)
        for shard in (shard for rank in handed_in for shard in shards.shards_of(rank)):
            if shard.param is param:
                shard.of(full).copy_(shards.value_of(shard))
        group.all_reduce(flat_memory(full)).wait()
        return full

    return gather
