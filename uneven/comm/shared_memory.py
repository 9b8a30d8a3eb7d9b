"""The group of ranks on one machine: collectives through shared memory, and a group of Gloo beside it.

Formed by comm/form.py, where the group of Gloo is torch's default one in a run's first generation: PyTorch's own
strategies and the user's code may use it, and a group without shared memory is taken from it. Where ranks are on
several machines comm/hierarchy.py forms one of these on each.
"""

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch
from torch import Tensor

from uneven.comm.exchange import DEVICE_SIZES, HOST_SIZES, Combine, Exchange, Sizes
from uneven.comm.group import Group
from uneven.comm.lost import Lost
from uneven.comm.segment import share_segment
from uneven.comm.shared_ring import Layout, create_semaphores
from uneven.comm.store import GROUP_TIMEOUT, Forming, Store, under
from uneven.comm.work import Traffic, Work


class SharedMemoryGroup:
    """Collectives of host and CUDA tensors through shared memory; all ranks are processes of one machine.

    Life cycle: `share` on all ranks at once, then `close`, which closes the groups made by `new_group` too.
    """

    backend = "shm"

    def __init__(self, gloo: Group, exchange: Exchange, formed: "_Formed") -> None:
        self.rank, self.world_size, self.generation = gloo.rank, gloo.world_size, gloo.generation
        self.traffic = Traffic()
        # On CPUs they ride with the gradients at no cost at all.
        self.has_cheap_host_sums = formed.has_cuda
        self._gloo, self._exchange, self._formed = gloo, exchange, formed
        formed.exchanges.append(exchange)
        exchange.meanwhile = formed.progress

    def all_reduce(self, tensor: Tensor) -> Work:
        return self._start(tensor, torch.add, None)

    def all_reduce_max(self, tensor: Tensor) -> Work:
        return self._start(tensor, torch.maximum, None)

    def broadcast(self, tensor: Tensor, owner: int = 0) -> Work:
        return self._start(tensor, None, owner)

    def reduce(self, tensor: Tensor, owner: int) -> Work:
        return self._start(tensor, torch.add, owner, has_result=False)

    def is_nccl(self, tensor: Tensor) -> bool:
        del tensor
        return False

    def new_group(self) -> Group:
        return self._formed.form()

    def claim(self, count: int) -> int:
        return self._gloo.claim(count)

    def abort(self, why: str) -> None:
        self._formed.lost.abort(why)
        self._gloo.abort(why)

    def close(self) -> None:
        if self._formed.lost.has_lost_peer:
            self.abort("a peer is gone")
        self._formed.lost.close()
        for exchange in self._formed.exchanges:
            exchange.close()
        self._formed.exchanges.clear()
        self._gloo.close()

    def _start(self, tensor: Tensor, combine: Combine | None, owner: int | None, has_result: bool = True) -> Work:
        work = self._exchange.start(tensor, combine, owner, has_result)
        name = "broadcast" if combine is None else "all_reduce" if owner is None else "reduce"
        return Work(work, tensor, self.traffic, self._formed.lost, name)


class _Formed:
    """What the groups of one set of ranks have in common; `form` forms one more, on all ranks at once."""

    def __init__(
        self,
        gloo: Group,
        store: Store,
        device: torch.device,
        has_cuda: bool,
        sizes: Sizes,
        verify: bool,
        timeout: timedelta,
        ranks: tuple[int, ...],
        meanwhile: Callable[[], None],
        forming: Forming,
    ) -> None:
        self.has_cuda = has_cuda
        self.lost = Lost()
        self._forming = forming.unless(self.lost)
        self._gloo, self._store, self._device = gloo, store, device
        self._sizes, self._verify, self._timeout = sizes, verify, timeout
        self._ranks, self._meanwhile = ranks, meanwhile
        self._count = 0
        self.exchanges: list[Exchange] = []

    def progress(self) -> None:
        """Ranks may wait for collectives of two groups in different order: whoever waits answers in both."""
        for exchange in self.exchanges:
            exchange.progress()
        self._meanwhile()

    def form(self) -> Group:
        """A group with a segment of its own; over Gloo where that is not possible, which rank 0 says."""
        rank, world_size = self._gloo.rank, self._gloo.world_size
        layout = Layout(world_size, self._sizes.ring, self._ranks)
        store = under(f"shared-memory/{self._count}", self._store)
        self._count += 1
        self.lost.check()
        prepare = partial(create_semaphores, layout=layout)
        segment = share_segment(store, rank, world_size, layout.size, prepare, self._device, self._forming)
        if isinstance(segment, str):
            if rank == 0:
                who = f"ranks {', '.join(map(str, self._ranks))}" if self._ranks else "ranks"
                print(f"uneven: {who} communicate over Gloo, shared memory is not possible: {segment}", file=sys.stderr)
            return self._gloo if self._count == 1 else self._gloo.new_group()
        exchange = Exchange(segment, layout, rank, self._sizes, self._verify, self._timeout.total_seconds(), self.lost)
        return SharedMemoryGroup(self._gloo, exchange, self)


def share(
    gloo: Group,
    store: Store,
    device: torch.device,
    verify: bool = False,
    sizes: Sizes | None = None,
    timeout: timedelta = GROUP_TIMEOUT,
    ranks: Sequence[int] = (),
    meanwhile: Callable[[], None] = lambda: None,
    forming: Forming | None = None,
) -> Group:
    """Shared memory for the ranks of a group of Gloo; that group itself where it is not possible, on all ranks alike.

    `device` is this rank's own. `verify`: every message carries a checksum, which its readers compare. `ranks` are
    their numbers in the run, if that has more; `meanwhile` is called now and then by whoever waits.
    """
    keys = [f"shared-memory/device/{rank}" for rank in range(gloo.world_size)]
    store.set(keys[gloo.rank], device.type)
    forming = forming or Forming()
    forming.wait(store, keys)
    has_cuda = any(store.get(key) == b"cuda" for key in keys)
    sizes = sizes or (DEVICE_SIZES if has_cuda else HOST_SIZES)
    return _Formed(gloo, store, device, has_cuda, sizes, verify, timeout, tuple(ranks), meanwhile, forming).form()
