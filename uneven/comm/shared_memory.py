"""The group of ranks on one machine: collectives through shared memory, and a group of Gloo beside it.

Formed by comm/form.py, where the group of Gloo is torch's default one in a run's first generation: PyTorch's own
strategies and the user's code may use it, and a group without shared memory is taken from it. Where ranks are on
several machines comm/hierarchy.py forms one of these on each.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from uneven.comm.exchange import DEVICE_SIZES, HOST_SIZES, Combine, Exchange, Peers, Sizes
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

    def __init__(self, family: "_Family", exchange: Exchange) -> None:
        self.rank = family.gloo.rank
        self.world_size = family.gloo.world_size
        self.generation = family.gloo.generation
        self.traffic = Traffic()
        # On CPUs they ride with the gradients at no cost at all.
        self.has_cheap_host_sums = family.has_cuda
        self._family = family
        self._exchange = exchange

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
        return self._family.form()

    def claim(self, count: int) -> int:
        return self._family.gloo.claim(count)

    def abort(self, why: str) -> None:
        self._family.lost.abort(why)
        self._family.gloo.abort(why)

    def close(self) -> None:
        if self._family.lost.has_lost_peer:
            self.abort("a peer is gone")
        self._family.lost.close()
        for exchange in self._family.exchanges:
            exchange.close()
        self._family.exchanges.clear()
        self._family.gloo.close()

    def _start(self, tensor: Tensor, combine: Combine | None, owner: int | None, has_result: bool = True) -> Work:
        work = self._exchange.start(tensor, combine, owner, has_result)
        name = "broadcast" if combine is None else "all_reduce" if owner is None else "reduce"
        return Work(work, tensor, self.traffic, self._family.lost, name)


@dataclass
class _Family:
    """What the groups of one set of ranks have in common; `form` forms one more, on all ranks at once."""

    gloo: Group
    store: Store
    device: torch.device
    has_cuda: bool
    sizes: Sizes
    verify: bool
    ranks: tuple[int, ...]
    meanwhile: Callable[[], None]
    forming: Forming
    lost: Lost = field(default_factory=Lost)
    exchanges: list[Exchange] = field(default_factory=list)
    num_formed: int = 0

    def progress(self) -> None:
        """Ranks may wait for collectives of two groups in different order: whoever waits answers in both."""
        for exchange in self.exchanges:
            exchange.progress()
        self.meanwhile()

    def form(self) -> Group:
        """A group with a segment of its own; over Gloo where that is not possible, which rank 0 says."""
        rank, world_size = self.gloo.rank, self.gloo.world_size
        layout = Layout(world_size, self.sizes.ring, self.ranks)
        store = under(f"shared-memory/{self.num_formed}", self.store)
        self.num_formed += 1
        self.lost.check()
        prepare = partial(create_semaphores, layout=layout)
        forming = self.forming.unless(self.lost)
        segment = share_segment(store, rank, world_size, layout.size, prepare, self.device, forming)
        if isinstance(segment, str):
            if rank == 0:
                who = f"ranks {', '.join(map(str, self.ranks))}" if self.ranks else "ranks"
                print(f"uneven: {who} communicate over Gloo, shared memory is not possible: {segment}", file=sys.stderr)
            return self.gloo if self.num_formed == 1 else self.gloo.new_group()
        peers = Peers(segment, layout, rank, GROUP_TIMEOUT.total_seconds(), self.progress)
        exchange = Exchange(segment, layout, peers, self.sizes, self.verify, self.lost)
        self.exchanges.append(exchange)
        return SharedMemoryGroup(self, exchange)


def share(
    gloo: Group,
    store: Store,
    device: torch.device,
    verify: bool = False,
    sizes: Sizes | None = None,
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
    return _Family(gloo, store, device, has_cuda, sizes, verify, tuple(ranks), meanwhile, forming).form()
