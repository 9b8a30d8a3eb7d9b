"""The process group: this rank, the world size, and the collectives.

Every collective of the project goes through a Group, and this folder is the only importer of torch.distributed. All
ranks must start the same collectives in the same order; nothing here checks that.
"""

import copy
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from uneven.comm.gloo_address import count_devices, gloo_backend
from uneven.comm.gloo_output import gloo_to_stderr
from uneven.comm.lost import Lost, free
from uneven.comm.sockets import Connections, listening_since
from uneven.comm.store import GROUP_TIMEOUT, ClaimCounter, Forming, Store, under
from uneven.comm.work import GlooWork, Traffic, Work
from uneven.errors import InputError

T = TypeVar("T")


class Group(Protocol):
    """Collectives over all ranks, in place and asynchronous: the tensor holds the result after `wait()`.

    A group belongs to one `generation` of its run. When a rank is lost or joins, it is given up, and the next one is
    formed (comm/form.py): whatever waits in it raises a GroupLostError, and so does whoever starts a collective.
    """

    rank: int
    world_size: int
    generation: int
    traffic: Traffic
    # Whether a sum of a few numbers on the host costs next to nothing, so that they need not ride with gradients.
    has_cheap_host_sums: bool

    def all_reduce(self, tensor: Tensor) -> Work: ...
    def all_reduce_max(self, tensor: Tensor) -> Work: ...
    def broadcast(self, tensor: Tensor, owner: int = 0) -> Work:
        """The owner's values to all ranks."""
        ...

    def reduce(self, tensor: Tensor, owner: int) -> Work:
        """The sum of all ranks' values at the owner; what the others then hold is undefined."""
        ...

    def is_nccl(self, tensor: Tensor) -> bool:
        """Whether collectives on this tensor use NCCL."""
        ...

    def new_group(self) -> "Group":
        """A group of the same ranks whose collectives do not queue behind this one's. Called on all ranks."""
        ...

    def claim(self, count: int) -> int:
        """Claim the next `count` numbers of a counter that all ranks share; returns the first. Waits for no rank.

        By one thread at a time, which need not be the one that runs the collectives.
        """
        ...

    def abort(self, why: str) -> None:
        """Give up this group and all that were made from it: GroupLostError(why) in all their collectives, those that
        some thread waits for and later ones. By any thread, at any time; returns at once. `close` comes after it.
        """
        ...

    def close(self) -> None:
        """Leave the group and those made from it. Waits for no peer, whatever is under way."""
        ...


class TorchGroup:
    """A group of processes, formed through the rendezvous store.

    Host tensors use Gloo. CUDA tensors too, or NCCL if `nccl` is this rank's device; then every rank must have one.
    With NCCL an abort is heard of at the next collective or wait, not by a thread that waits for the device: torch's
    own abort of a communicator did not return beside one that does (torch 2.11, two ranks on one H200).
    """

    has_cheap_host_sums = False
    _lost = Lost()  # every group has its own

    def __init__(self, store: Store, rank: int, size: int, nccl: torch.device | None = None) -> None:
        if dist.is_initialized():
            raise InputError(
                "torch's default process group is there already, and this run makes it: take init_process_group(...) "
                "out of the script, or call destroy_process_group() before; to train in a group of your own there is "
                "uneven.parallel"
            )
        self.rank = rank
        self.world_size = size
        self.generation = 0
        self.traffic = Traffic()
        self._lost = Lost()
        self._family = [self]  # with those made from it
        self._store = store
        self._counter = ClaimCounter(store)
        self._nccl = nccl
        self.backend = "gloo" if nccl is None else "nccl"
        gloo = gloo_backend()
        self._backend = f"cpu:{gloo},cuda:nccl" if nccl is not None else gloo if gloo == "gloo" else f"cpu:{gloo}"
        if nccl is not None:
            torch.cuda.set_device(nccl)
        self._connections = Connections(rank, size)
        self._process_group: Any = None
        options: dict[str, Any] = {"store": store, "rank": rank, "world_size": size, "timeout": GROUP_TIMEOUT}
        self._form(lambda: dist.init_process_group(self._backend, **options))
        self._process_group = dist.group.WORLD
        self._connect()

    def all_reduce(self, tensor: Tensor) -> Work:
        return self._start(dist.all_reduce, tensor, op=dist.ReduceOp.SUM)

    def all_reduce_max(self, tensor: Tensor) -> Work:
        return self._start(dist.all_reduce, tensor, op=dist.ReduceOp.MAX)

    def broadcast(self, tensor: Tensor, owner: int = 0) -> Work:
        return self._start(dist.broadcast, tensor, group_src=owner)

    def reduce(self, tensor: Tensor, owner: int) -> Work:
        return self._start(dist.reduce, tensor, group_dst=owner, op=dist.ReduceOp.SUM)

    def is_nccl(self, tensor: Tensor) -> bool:
        return self._nccl is not None and tensor.is_cuda

    def new_group(self) -> "TorchGroup":
        self._lost.check()
        twin = copy.copy(self)
        twin.traffic = Traffic()
        # The timeout is not inherited from the default group.
        twin._process_group = self._form(lambda: dist.new_group(backend=self._backend, timeout=GROUP_TIMEOUT))
        twin._connect()
        self._family.append(twin)
        return twin

    def claim(self, count: int) -> int:
        return self._counter.claim(count)

    def abort(self, why: str) -> None:
        self._lost.abort(why)
        self._connections.cut()

    def close(self) -> None:
        if self._lost.has_lost_peer:
            self.abort("a peer is gone")
        self._lost.close()
        if dist.is_initialized() and self._family:
            world: Any = dist.distributed_c10d._world
            held = list(world.pg_map)  # the user's, too: none is freed before all threads have let go of it
            dist.destroy_process_group()
            for group in self._family:
                group._process_group = None
            self._family.clear()
            free(held, self._lost.is_lost)

    def _form(self, form: Callable[[], T]) -> T:
        """Form torch's default group or one more, and remember where its connections are, to cut them."""
        with gloo_to_stderr():
            formed, own = listening_since(form, count_devices())
        self._connections.add(under(f"connections/{len(self._family)}", self._store), own, Forming())
        self._connections.limit_silence()
        return formed

    def _connect(self) -> None:
        """Connect NCCL now: it connects at the first collective, which must not run in the averaging thread."""
        if self._nccl is not None:
            dist.all_reduce(torch.zeros(1, device=self._nccl), group=self._process_group)
            torch.cuda.synchronize(self._nccl)

    def _start(self, collective: Any, tensor: Tensor, **options: Any) -> Work:
        if self._lost.error is not None:
            self._lost.check()
        work = collective(tensor, group=self._process_group, async_op=True, **options)
        return self._kind_of_work(tensor)(work, tensor, self.traffic, self._lost, collective.__name__)

    def _kind_of_work(self, tensor: Tensor) -> type[Work]:
        return Work if self.is_nccl(tensor) else GlooWork


def has_nccl() -> bool:
    """Whether this torch was built with NCCL."""
    return dist.is_available() and dist.is_nccl_available()


class SoloGroup:
    """A group of one rank: collectives return at once and send nothing."""

    rank = 0
    world_size = 1
    has_cheap_host_sums = True

    def __init__(self, generation: int = 0) -> None:
        self.generation = generation
        self.traffic = Traffic()
        self._lost = Lost()
        self._claimed = 0

    def all_reduce(self, tensor: Tensor) -> Work:
        self._lost.check()
        return Work(_CompletedWork(), tensor, Traffic())

    all_reduce_max = all_reduce

    def broadcast(self, tensor: Tensor, owner: int = 0) -> Work:
        assert owner == 0
        return self.all_reduce(tensor)

    reduce = broadcast

    def is_nccl(self, tensor: Tensor) -> bool:
        del tensor
        return False

    def new_group(self) -> "SoloGroup":
        twin = SoloGroup(self.generation)
        twin._lost = self._lost
        return twin

    def claim(self, count: int) -> int:
        self._claimed += count
        return self._claimed - count

    def abort(self, why: str) -> None:
        """A newcomer makes a new generation: the rank that was alone hears of it at its next collective."""
        self._lost.abort(why)

    def close(self) -> None: ...


class _CompletedWork:
    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> "torch.futures.Future[None]":
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future
