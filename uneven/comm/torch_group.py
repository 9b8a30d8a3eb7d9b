"""Groups over torch process groups: torch's default one, Gloo beside it, and one that somebody else has formed.

TorchGroup is a run's first group, GlooGroup what comm/form.py and comm/hierarchy.py form beside it or later, and
JoinedGroup what strategies and optimizers of parallel/ are given in loops that have a process group already.
"""

import copy
import inspect
import threading
import uuid
from collections.abc import Callable
from typing import Any, TypeVar, Union

import torch
import torch.distributed as dist
from torch import Tensor

from uneven.comm.gather import broadcast_json
from uneven.comm.gloo import (
    BACKEND,
    Connections,
    gloo_backend,
    gloo_to_stderr,
    listening_since,
    make_gloo,
    make_options,
)
from uneven.comm.group import Group, SoloGroup
from uneven.comm.lost import Lost, free
from uneven.comm.store import GROUP_TIMEOUT, ClaimCounter, Forming, Store, under
from uneven.comm.work import GlooWork, Traffic, Work
from uneven.errors import GroupLostError, InputError

T = TypeVar("T")
Own = TypeVar("Own", bound="ProcessGroupCollectives")

# What strategies take: None is torch's default group, or one rank alone where no group was formed.
AnyGroup = Union[Group, "dist.ProcessGroup", None]

_ONE_AT_A_TIME = threading.Lock()  # Gloo's devices are made so: the address of each is known then


class ProcessGroupCollectives:
    """A Group's collectives over a torch process group, on Gloo or, with `nccl` this rank's device, on NCCL.

    `new_group` makes copies with a process group of their own, which are lost, aborted and closed together. Ranks are
    counted inside the group; torch counts those of a sub-group globally, and translates (`group_src`, `group_dst`).
    """

    has_cheap_host_sums = False

    def __init__(self, rank: int, world_size: int, nccl: torch.device | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.generation = 0
        self.traffic = Traffic()
        self.process_group: Any = None
        self._nccl = nccl
        self._gloo_devices = {"cpu", "cuda"} if nccl is None else {"cpu"}
        self._lost = Lost()
        self._family = [self]  # with those made from it

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

    def new_group(self: Own) -> Own:
        self._lost.check()
        twin = copy.copy(self)
        twin.traffic = Traffic()
        twin.process_group = self._form_next()
        twin._connect_nccl()
        self._family.append(twin)
        return twin

    def abort(self, why: str) -> None:
        self._lost.abort(why)

    def close(self) -> None:
        if self._lost.has_lost_peer:
            self.abort("a peer is gone")
        self._lost.close()
        self._free()

    def _form_next(self) -> Any:
        raise NotImplementedError

    def _free(self) -> None:
        process_groups = [group.process_group for group in self._family if group.process_group is not None]
        for group in self._family:
            group.process_group = None
        self._family.clear()
        free(process_groups, self._lost.is_lost)

    def _connect_nccl(self) -> None:
        """Connect NCCL now: it connects at the first collective, which must not run in the averaging thread."""
        if self._nccl is not None:
            dist.all_reduce(torch.zeros(1, device=self._nccl), group=self.process_group)
            torch.cuda.synchronize(self._nccl)

    def _start(self, collective: Any, tensor: Tensor, **options: Any) -> Work:
        if self._lost.error is not None:
            self._lost.check()
        collective = inspect.unwrap(collective)  # torch's wrapper hides an error by its own about a group unknown to it
        work = collective(tensor, group=self.process_group, async_op=True, **options)
        kind = GlooWork if tensor.device.type in self._gloo_devices else Work
        return kind(work, tensor, self.traffic, self._lost, collective.__name__)


class TorchGroup(ProcessGroupCollectives):
    """torch's default process group, formed through the rendezvous store.

    Host tensors use Gloo. CUDA tensors too, or NCCL if `nccl` is this rank's device; then every rank must have one.
    With NCCL an abort is heard of at the next collective or wait, not by a thread that waits for the device: torch's
    own abort of a communicator did not return beside one that does (torch 2.11, two ranks on one H200).
    """

    def __init__(self, store: Store, rank: int, size: int, nccl: torch.device | None = None) -> None:
        if dist.is_initialized():
            raise InputError(
                "torch's default process group is there already, and this run makes it: take init_process_group(...) "
                "out of the script, or call destroy_process_group() before; to train in a group of your own there is "
                "uneven.parallel"
            )
        super().__init__(rank, size, nccl)
        self.backend = "gloo" if nccl is None else "nccl"
        gloo = gloo_backend()
        self._backends = f"cpu:{gloo},cuda:nccl" if nccl is not None else gloo if gloo == "gloo" else f"cpu:{gloo}"
        if nccl is not None:
            torch.cuda.set_device(nccl)
        self._store = store
        self._counter = ClaimCounter(store)
        self._connections = Connections(rank, size)
        self._num_formed = 0
        options: dict[str, Any] = {"store": store, "rank": rank, "world_size": size, "timeout": GROUP_TIMEOUT}
        self._form(lambda: dist.init_process_group(self._backends, **options))
        self.process_group = dist.group.WORLD
        self._connect_nccl()

    def claim(self, count: int) -> int:
        return self._counter.claim(count)

    def abort(self, why: str) -> None:
        super().abort(why)
        self._connections.cut()

    def _form_next(self) -> Any:
        # The timeout is not inherited from the default group.
        return self._form(lambda: dist.new_group(backend=self._backends, timeout=GROUP_TIMEOUT))

    def _form(self, form: Callable[[], T]) -> T:
        """Form torch's default group or one more, and remember where its connections are, to cut them."""
        with gloo_to_stderr():
            formed, own = listening_since(form)
        self._connections.add(under(f"connections/{self._num_formed}", self._store), own, Forming())
        self._num_formed += 1
        self._connections.limit_silence()
        return formed

    def _free(self) -> None:
        if not (dist.is_initialized() and self._family):
            return
        world: Any = dist.distributed_c10d._world
        process_groups = list(world.pg_map)  # the user's, too: none is freed before all threads have let go of it
        dist.destroy_process_group()
        for group in self._family:
            group.process_group = None
        self._family.clear()
        free(process_groups, self._lost.is_lost)


class GlooGroup(ProcessGroupCollectives):
    """Gloo among some of the ranks, counted among themselves and formed by them alone, unknown to torch.

    torch has one default group per process, and forms it with all ranks of the world. `store` has the keys of this
    group alone. Life cycle: `connect` on all of its ranks at once, collectives, `close`. One that is never connected
    has claims alone.
    """

    backend = "gloo"

    def __init__(self, store: Store, rank: int, size: int, generation: int = 0, forming: Forming | None = None) -> None:
        super().__init__(rank, size)
        self.generation = generation
        self._store = store
        self._counter = ClaimCounter(store)
        self._connections = Connections(rank, size)
        self._forming = (forming or Forming()).unless(self._lost)

    def connect(self) -> None:
        """GroupLostError where a peer does not come, or the group is given up meanwhile."""
        if self.process_group is None:
            self.process_group = self._form(self._store)

    def claim(self, count: int) -> int:
        return self._counter.claim(count)

    def abort(self, why: str) -> None:
        super().abort(why)
        self._connections.cut()

    def _form_next(self) -> Any:
        return self._form(under(f"twin/{len(self._family)}", self._store))

    def _form(self, store: Store) -> Any:
        """Gloo's constructor waits for peers: in a thread, which ends by Gloo's own limit where it is left alone."""
        self._lost.check()
        with _ONE_AT_A_TIME:
            options, own = listening_since(lambda: make_options(self._forming.limit))
        self._connections.add(store, own, self._forming)
        made: list[Any] = []
        failed: list[RuntimeError] = []
        # A connection of its own: that of a thread that is left alone stays busy.
        own_store = under("gloo", store.clone())  # type: ignore[attr-defined]

        def make() -> None:
            try:
                with gloo_to_stderr():
                    made.append(make_gloo(own_store, self.rank, self.world_size, options))
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


class JoinedGroup(ProcessGroupCollectives):
    """The user's own group: it has no counter of claims, and `close` ends only those made from it by `new_group`.

    A group of NCCL alone has no collectives for host tensors, which small statistics are: those are sent by way of
    this rank's current CUDA device.
    """

    def __init__(self, process_group: Any) -> None:
        config = dist.get_backend_config(process_group)
        self._backends = dict(pair.split(":") for pair in config.split(",") if ":" in pair)  # by kind of device
        has_nccl = self._backends.get("cuda") == "nccl" and torch.cuda.is_available()
        nccl = torch.device("cuda", torch.cuda.current_device()) if has_nccl else None
        super().__init__(dist.get_rank(process_group), dist.get_world_size(process_group), nccl)
        self.process_group = process_group
        self._gloo_devices = {device for device, name in self._backends.items() if name in ("gloo", BACKEND)}

    def claim(self, count: int) -> int:
        raise RuntimeError(f"claim({count}): a group that was formed elsewhere has no counter; policies form their own")

    def close(self) -> None:
        """Of the group itself nothing: whoever formed it ends it."""
        for twin in self._family[1:]:
            process_groups, twin.process_group = [twin.process_group], None
            if twin._nccl is not None and not self._lost.is_lost:
                process_groups[0].shutdown()
            free(process_groups, self._lost.is_lost)
            twin._lost = Lost()
            twin._lost.close()
        del self._family[1:]

    def new_host_group(self) -> "JoinedGroup":
        """As `new_group`, over Gloo alone: collectives of host tensors beside those of the user's group."""
        self._lost.check()
        twin = copy.copy(self)
        twin.traffic = Traffic()
        twin._nccl, twin._backends = None, {"cpu": gloo_backend()}
        twin._gloo_devices = {"cpu"}
        twin.process_group = self._form(twin._backends)
        self._family.append(twin)
        return twin

    def _form_next(self) -> Any:
        return self._form(self._backends)

    def _form(self, backends: dict[str, str]) -> Any:
        """torch's own new_group wants every rank of the world, or with local synchronization as many groups on every
        rank: it names the group by their number. So this one is unknown to torch, under a name that the ranks agree on.
        """
        name = broadcast_json(self, f"uneven/{uuid.uuid4().hex}")
        store = under(name, dist.distributed_c10d._get_process_group_store(self.process_group))
        types = dist.Backend.backend_type_map
        group: Any = dist.ProcessGroup(store, self.rank, self.world_size)
        made: dict[str, Any] = {}
        for device, backend in backends.items():
            if backend not in made:
                made[backend] = self._make_backend(backend, under(backend, store))
            group._register_backend(torch.device(device), types[backend], made[backend])
        group._set_default_backend(types["nccl" if "nccl" in made else next(iter(made))])
        return group

    def _make_backend(self, name: str, store: Store) -> Any:
        if name in ("gloo", BACKEND):
            return make_gloo(store, self.rank, self.world_size, make_options(GROUP_TIMEOUT))
        if name in ("nccl", "xccl"):
            kind = getattr(dist.distributed_c10d, f"ProcessGroup{name.upper()}")
            options = kind.Options()
            options._timeout = GROUP_TIMEOUT
            return kind(store, self.rank, self.world_size, options)
        raise InputError(
            f"group: its backend is {name!r}, and FSDP needs a second group of the same ranks, which can be formed "
            "with 'gloo' and 'nccl'; make the group with one of these, or use Zero2"
        )

    def _start(self, collective: Any, tensor: Tensor, **options: Any) -> Work:
        if tensor.is_cuda or "cpu" in self._backends:
            return super()._start(collective, tensor, **options)
        self._lost.check()
        assert self._nccl is not None, "a group without host tensors has NCCL"
        moved = tensor.to(self._nccl)
        inspect.unwrap(collective)(moved, group=self.process_group, **options)
        tensor.copy_(moved)
        return SoloGroup().all_reduce(tensor)


def as_group(group: AnyGroup) -> Group:
    """The Group of what a user has: one of ours, a torch process group, or None for torch's default group."""
    if group is None:
        is_formed = dist.is_available() and dist.is_initialized()
        return JoinedGroup(dist.group.WORLD) if is_formed else SoloGroup()
    if isinstance(group, dist.ProcessGroup):
        return JoinedGroup(group)
    if hasattr(group, "all_reduce"):
        return group
    outside: Any = dist.GroupMember.NON_GROUP_MEMBER
    if group == outside:
        raise InputError("group: this rank is not in it; make the strategy only on the ranks of torch's new_group")
    raise InputError(
        f"group={group!r} must be a torch process group (as from torch.distributed.new_group) or None for the default "
        "one"
    )


def as_host_group(group: AnyGroup) -> Group:
    """A group of the same ranks for numbers on the host, whose collectives do not queue behind those of the user's.

    A collective; `close` it.
    """
    joined = as_group(group)
    return joined.new_host_group() if isinstance(joined, JoinedGroup) else joined.new_group()


def has_nccl() -> bool:
    """Whether this torch was built with NCCL."""
    return dist.is_available() and dist.is_nccl_available()
