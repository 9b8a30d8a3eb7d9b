"""Gloo among some of the ranks, formed by them alone, beside torch's default group of all or without it.

Used by comm/hierarchy.py: between machines, and on a machine whose ranks cannot share memory; and by comm/form.py for
every generation but the first: torch has one default group per process, and forms it with all ranks of the world.
"""

import threading
from typing import Any

import torch.distributed as dist
from torch import Tensor

from uneven.comm.gloo_address import count_devices, make_options
from uneven.comm.gloo_output import gloo_to_stderr
from uneven.comm.lost import Lost, free
from uneven.comm.sockets import Connections, listening_since
from uneven.comm.store import GROUP_TIMEOUT, ClaimCounter, Forming, Store, under
from uneven.comm.work import GlooWork, Traffic
from uneven.errors import GroupLostError

_ONE_AT_A_TIME = threading.Lock()  # devices, so that the address of each is known


class GlooGroup:
    """A Group of `size` ranks, counted among themselves; `store` has the keys of this group alone.

    Life cycle: `connect` on all of its ranks at once, collectives, `close`, which closes the groups made by `new_group`
    too. One that is never connected has claims alone.
    """

    backend = "gloo"
    has_cheap_host_sums = False

    def __init__(self, store: Store, rank: int, size: int, generation: int = 0, forming: Forming | None = None) -> None:
        self._formed = _Formed(store, rank, size, generation, forming or Forming())
        self._begin(store)

    def _begin(self, store: Store) -> None:
        self.rank, self.world_size, self.generation = self._formed.rank, self._formed.size, self._formed.generation
        self.traffic = Traffic()
        self._store = store
        self.process_group: Any = None
        self._formed.groups.append(self)

    def connect(self) -> None:
        """GroupLostError where a peer does not come, or the group is given up meanwhile."""
        if self.process_group is None:
            self.process_group = self._formed.connect(self._store)

    def all_reduce(self, tensor: Tensor) -> GlooWork:
        return self._all_reduce(tensor, dist.ReduceOp.SUM)

    def all_reduce_max(self, tensor: Tensor) -> GlooWork:
        return self._all_reduce(tensor, dist.ReduceOp.MAX)

    def broadcast(self, tensor: Tensor, owner: int = 0) -> GlooWork:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = owner, 0
        return self._start("broadcast", tensor, options)

    def reduce(self, tensor: Tensor, owner: int) -> GlooWork:
        options: Any = dist.ReduceOptions()
        options.reduceOp, options.rootRank, options.rootTensor = dist.ReduceOp.SUM, owner, 0
        return self._start("reduce", tensor, options)

    def is_nccl(self, tensor: Tensor) -> bool:
        del tensor
        return False

    def new_group(self) -> "GlooGroup":
        twin = GlooGroup.__new__(GlooGroup)
        twin._formed = self._formed
        twin._begin(self._formed.next_store())
        twin.connect()
        return twin

    def claim(self, count: int) -> int:
        return self._formed.counter.claim(count)

    def abort(self, why: str) -> None:
        self._formed.abort(why)

    def close(self) -> None:
        self._formed.close()

    def _all_reduce(self, tensor: Tensor, op: Any) -> GlooWork:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return self._start("allreduce", tensor, options)

    def _start(self, name: str, tensor: Tensor, options: Any) -> GlooWork:
        lost = self._formed.lost
        if lost.error is not None:
            lost.check()
        work = getattr(self.process_group, name)([tensor], options)
        return GlooWork(work, tensor, self.traffic, lost, name.replace("allreduce", "all_reduce"))


class _Formed:
    """What a group and those made from it have in common."""

    def __init__(self, store: Store, rank: int, size: int, generation: int, forming: Forming) -> None:
        self.rank, self.size, self.generation = rank, size, generation
        self.lost = Lost()
        self.groups: list[GlooGroup] = []
        self._store, self._forming = store, forming.unless(self.lost)
        self.counter = ClaimCounter(store)
        self._twins = 0
        self._connections = Connections(rank, size)

    def next_store(self) -> Store:
        """The keys of one more group; on all ranks in the same order."""
        self._twins += 1
        return under(f"twin/{self._twins}", self._store)

    def connect(self, store: Store) -> Any:
        """Gloo's constructor waits for peers: in a thread, which ends by Gloo's own limit where it is left alone."""
        self.lost.check()
        with _ONE_AT_A_TIME:
            options, own = listening_since(lambda: make_options(self._forming.limit), count_devices())
        self._connections.add(store, own, self._forming)
        made: list[Any] = []
        failed: list[RuntimeError] = []
        # A connection of its own: that of a thread that is left alone stays busy.
        own_store = under("gloo", store.clone())  # type: ignore[attr-defined]

        def make() -> None:
            gloo: Any = dist.ProcessGroupGloo
            try:
                with gloo_to_stderr():
                    made.append(gloo(own_store, self.rank, self.size, options))
            except RuntimeError as error:
                failed.append(error)

        thread = threading.Thread(target=make, name="uneven-connect", daemon=True)
        thread.start()
        self._forming.poll(lambda: not thread.is_alive())
        if failed and isinstance(failed[0], dist.DistNetworkError):
            raise failed[0]  # the store is gone, not a peer
        if failed:
            raise GroupLostError(f"a peer was lost while the group was formed: {failed[0]}") from failed[0]
        made[0]._set_default_timeout(GROUP_TIMEOUT)
        self._connections.limit_silence()
        return made.pop()

    def abort(self, why: str) -> None:
        self.lost.abort(why)
        self._connections.cut()

    def close(self) -> None:
        if self.lost.has_lost_peer:
            self.abort("a peer is gone")
        self.lost.close()
        held = [group.process_group for group in self.groups if group.process_group is not None]
        for group in self.groups:
            group.process_group = None
        self.groups.clear()
        if held:
            free(held, self.lost.is_lost)
