"""The group: this rank's place among the ranks, and the collectives they share.

Every collective of the project goes through a Group, and this folder is the only importer of torch.distributed.
All ranks must start the same collectives in the same order; nothing here checks that, the callers' plan does.
"""

import copy
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from uneven.comm.store import Store
from uneven.comm.work import Traffic, Work

# A dead peer raises at once and a stuck one is found by the watch; this is only the last resort.
LAST_RESORT = timedelta(minutes=30)


class Group(Protocol):
    """Collectives over all ranks, in place and asynchronous: the tensor holds the result after `wait()`."""

    rank: int
    size: int
    traffic: Traffic

    def sum_(self, tensor: Tensor) -> Work: ...
    def max_(self, tensor: Tensor) -> Work: ...
    def broadcast_(self, tensor: Tensor) -> Work:
        """Rank 0's values to everyone."""
        ...

    def another(self) -> "Group":
        """A group of the same ranks whose collectives do not queue behind this one's; called by all ranks alike."""
        ...

    def claim(self, many: int) -> int:
        """Take the next `many` of a count that all ranks share; returns the first. Nobody waits for anybody."""
        ...

    def close(self) -> None: ...


class GlooGroup:
    """A group over Gloo, formed through the rendezvous store."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.traffic = Traffic()
        self._store = store
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=LAST_RESORT)
        self._road: Any = dist.group.WORLD

    def sum_(self, tensor: Tensor) -> Work:
        return self._start(dist.all_reduce, tensor, op=dist.ReduceOp.SUM)

    def max_(self, tensor: Tensor) -> Work:
        return self._start(dist.all_reduce, tensor, op=dist.ReduceOp.MAX)

    def broadcast_(self, tensor: Tensor) -> Work:
        return self._start(dist.broadcast, tensor, src=0)

    def another(self) -> "GlooGroup":
        twin = copy.copy(self)
        twin.traffic = Traffic()
        twin._road = dist.new_group(backend="gloo", timeout=LAST_RESORT)  # it does not inherit the first one's
        return twin

    def claim(self, many: int) -> int:
        return int(self._store.add("claims", many)) - many

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _start(self, collective: Any, tensor: Tensor, **options: Any) -> Work:
        return Work(collective(tensor, group=self._road, async_op=True, **options), tensor, self.traffic)


class SoloGroup:
    """One rank alone: every collective is done before it starts, and nothing is sent."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.traffic = Traffic()
        self._claimed = 0

    def sum_(self, tensor: Tensor) -> Work:
        return Work(_Done(), tensor, Traffic())

    max_ = sum_
    broadcast_ = sum_

    def another(self) -> "SoloGroup":
        return SoloGroup()

    def claim(self, many: int) -> int:
        self._claimed += many
        return self._claimed - many

    def close(self) -> None: ...


class _Done:
    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> "torch.futures.Future[None]":
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future
