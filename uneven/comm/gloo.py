"""Gloo among some of the ranks, formed by them alone, beside torch's default group of all.

Used by comm/hierarchy.py: between machines, and on a machine whose ranks cannot share memory. torch's own `new_group`
makes every rank of the world take part, or names a group by how many this process has, which differs between ranks.
"""

from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from uneven.comm.group import TIMEOUT
from uneven.comm.store import Store, under
from uneven.comm.work import Traffic, Work

# A process group whose collectives are not over blocks in its destructor until they are, and that may take minutes
# where a peer is lost. Such groups are kept for the rest of the process.
_UNFINISHED: list[Any] = []


class GlooGroup:
    """A Group of `size` ranks, counted among themselves; `store` has the keys of this group alone.

    Life cycle: `connect` on all of its ranks at once, collectives, `close`.
    """

    backend = "gloo"
    generation = 0
    has_cheap_host_sums = False

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.rank, self.world_size = rank, size
        self.traffic = Traffic()
        self._store = store
        self._twins = 0
        self._gloo: Any = None
        self._works: WeakSet[GlooWork] = WeakSet()  # those that somebody holds

    def connect(self) -> None:
        """At the address that torch's default group has, where there is one."""
        if self._gloo is None:
            formed: Any = dist.ProcessGroupGloo
            keys = under("gloo", self._store)
            self._gloo = formed(keys, self.rank, self.world_size, _options_of_default_group() or TIMEOUT)

    def all_reduce(self, tensor: Tensor) -> "GlooWork":
        return self._all_reduce(tensor, dist.ReduceOp.SUM)

    def all_reduce_max(self, tensor: Tensor) -> "GlooWork":
        return self._all_reduce(tensor, dist.ReduceOp.MAX)

    def broadcast(self, tensor: Tensor, owner: int = 0) -> "GlooWork":
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = owner, 0
        return self._started(self._gloo.broadcast([tensor], options), tensor)

    def reduce(self, tensor: Tensor, owner: int) -> "GlooWork":
        options: Any = dist.ReduceOptions()
        options.reduceOp, options.rootRank, options.rootTensor = dist.ReduceOp.SUM, owner, 0
        return self._started(self._gloo.reduce([tensor], options), tensor)

    def is_nccl(self, tensor: Tensor) -> bool:
        del tensor
        return False

    def new_group(self) -> "GlooGroup":
        self._twins += 1
        twin = GlooGroup(under(f"twin/{self._twins}", self._store), self.rank, self.world_size)
        twin.connect()
        return twin

    def claim(self, count: int) -> int:
        return int(self._store.add("claims", count)) - count

    def close(self) -> None:
        """Waits for nobody, whatever was started."""
        if not all(work.is_completed() for work in self._works):
            _UNFINISHED.append(self._gloo)
        self._gloo = None

    def _all_reduce(self, tensor: Tensor, op: Any) -> "GlooWork":
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return self._started(self._gloo.allreduce([tensor], options), tensor)

    def _started(self, work: Any, tensor: Tensor) -> "GlooWork":
        started = GlooWork(work, tensor, self.traffic)
        self._works.add(started)
        return started


def _options_of_default_group() -> Any:
    """Network interface and timeout of the group that all ranks have formed; None where there is no such group."""
    if not dist.is_initialized():
        return None
    whole: Any = dist.group.WORLD
    gloo = whole._get_backend(torch.device("cpu"))
    return getattr(gloo, "options", None) if isinstance(gloo, dist.ProcessGroupGloo) else None


class GlooWork(Work):
    """A collective over Gloo that can be waited for in slices, so that whoever waits can see to something else."""

    def wait_for(self, seconds: float) -> bool:
        """Wait at most so long, in whole milliseconds; whether it is completed. Raises what it has failed with."""
        inner: Any = self._inner
        if inner is None:
            return True
        try:
            inner.wait(timedelta(milliseconds=max(1, round(1e3 * seconds))))
        except RuntimeError:
            if not inner.is_completed():  # the slice is over
                return False
        self.wait()
        return True
