"""The group: this rank's place among the ranks, and the collectives they share.

Every collective of the project goes through a Group, and this folder is the only importer of torch.distributed.
All ranks must start the same collectives in the same order; nothing here checks that, the callers' plan does.
"""

import copy
import os
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
    world_size: int
    traffic: Traffic

    def all_reduce(self, tensor: Tensor) -> Work: ...
    def all_reduce_max(self, tensor: Tensor) -> Work: ...
    def broadcast(self, tensor: Tensor, owner: int = 0) -> Work:
        """The owner's values to everyone."""
        ...

    def reduce(self, tensor: Tensor, owner: int) -> Work:
        """Everyone's values summed at the owner; what the others then hold is undefined."""
        ...

    def is_nccl(self, tensor: Tensor) -> bool:
        """Whether this tensor would travel over NCCL."""
        ...

    def new_group(self) -> "Group":
        """A group of the same ranks whose collectives do not queue behind this one's; called by all ranks alike."""
        ...

    def claim(self, many: int) -> int:
        """Take the next `many` of a count that all ranks share; returns the first. Nobody waits for anybody."""
        ...

    def close(self) -> None: ...


class TorchGroup:
    """A group of processes, formed through the rendezvous store.

    Tensors of the host are summed over Gloo. Those of a CUDA device too, or over NCCL where `nccl` names this rank's
    device; then every rank must have one.
    """

    def __init__(self, store: Store, rank: int, size: int, nccl: torch.device | None = None) -> None:
        self.rank = rank
        self.world_size = size
        self.traffic = Traffic()
        self._store = store
        self._nccl = nccl
        self._backend = "gloo" if nccl is None else "cpu:gloo,cuda:nccl"
        if nccl is not None:
            torch.cuda.set_device(nccl)
        dist.init_process_group(self._backend, store=store, rank=rank, world_size=size, timeout=LAST_RESORT)
        self._process_group: Any = dist.group.WORLD
        self._connect()

    def all_reduce(self, tensor: Tensor) -> Work:
        return self._start(dist.all_reduce, tensor, op=dist.ReduceOp.SUM)

    def all_reduce_max(self, tensor: Tensor) -> Work:
        return self._start(dist.all_reduce, tensor, op=dist.ReduceOp.MAX)

    def broadcast(self, tensor: Tensor, owner: int = 0) -> Work:
        return self._start(dist.broadcast, tensor, src=owner)

    def reduce(self, tensor: Tensor, owner: int) -> Work:
        return self._start(dist.reduce, tensor, dst=owner, op=dist.ReduceOp.SUM)

    def is_nccl(self, tensor: Tensor) -> bool:
        return self._nccl is not None and tensor.is_cuda

    def new_group(self) -> "TorchGroup":
        twin = copy.copy(self)
        twin.traffic = Traffic()
        twin._process_group = dist.new_group(
            backend=self._backend, timeout=LAST_RESORT
        )  # it does not inherit the first one's
        twin._connect()
        return twin

    def claim(self, many: int) -> int:
        return int(self._store.add("claims", many)) - many

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _connect(self) -> None:
        """NCCL connects at the first collective, which must not be a background thread's."""
        if self._nccl is not None:
            dist.all_reduce(torch.zeros(1, device=self._nccl), group=self._process_group)
            torch.cuda.synchronize(self._nccl)

    def _start(self, collective: Any, tensor: Tensor, **options: Any) -> Work:
        return Work(collective(tensor, group=self._process_group, async_op=True, **options), tensor, self.traffic)


def has_nccl() -> bool:
    """Whether this torch was built with NCCL."""
    return dist.is_available() and dist.is_nccl_available()


def form_group(store: Store, rank: int, size: int, device: torch.device, backend: str, is_crowded: bool) -> "Group":
    """This rank's group; `backend` is 'nccl' or 'cpu'. Where it is crowded two ranks of this machine share a GPU."""
    if size == 1:
        return SoloGroup()
    if backend != "nccl":
        return TorchGroup(store, rank, size)
    if is_crowded:
        _pretend_to_be_far_apart(rank)
    return TorchGroup(store, rank, size, device)


def _pretend_to_be_far_apart(rank: int) -> None:
    """NCCL refuses two ranks on one GPU unless it takes them for two hosts: slow, but the arithmetic is the same."""
    os.environ.update({"NCCL_HOSTID": f"uneven-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"})


class SoloGroup:
    """One rank alone: every collective is done before it starts, and nothing is sent."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self.traffic = Traffic()
        self._claimed = 0

    def all_reduce(self, tensor: Tensor) -> Work:
        return Work(_Done(), tensor, Traffic())

    all_reduce_max = all_reduce

    def broadcast(self, tensor: Tensor, owner: int = 0) -> Work:
        assert owner == 0
        return self.all_reduce(tensor)

    reduce = broadcast

    def is_nccl(self, tensor: Tensor) -> bool:
        del tensor
        return False

    def new_group(self) -> "SoloGroup":
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
