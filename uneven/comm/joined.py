"""A torch process group that somebody else has formed, as a Group: strategies run in loops that have one already.

Called where a strategy or an optimizer of parallel/ is made by hand. Ranks of a Group are counted inside the group;
torch counts those of a sub-group globally, and the translation is torch's own (`group_src`, `group_dst`).
"""

import copy
import inspect
import uuid
from typing import Any, Union

import torch
import torch.distributed as dist
from torch import Tensor

from uneven.comm.gather import broadcast_json
from uneven.comm.gloo_address import BACKEND, make_options
from uneven.comm.group import Group, SoloGroup, TorchGroup
from uneven.comm.lost import Lost, free
from uneven.comm.store import GROUP_TIMEOUT, Store, under
from uneven.comm.work import GlooWork, Traffic, Work
from uneven.errors import InputError

# What strategies take: None is torch's default group, or one rank alone where no group was formed.
AnyGroup = Union[Group, "dist.ProcessGroup", None]


def as_group(group: AnyGroup) -> Group:
    """The Group of what a user has: one of ours, a torch process group, or None for torch's default group."""
    if group is None:
        is_formed = dist.is_available() and dist.is_initialized()
        return JoinedGroup(dist.group.WORLD) if is_formed else SoloGroup()
    if isinstance(group, dist.ProcessGroup):
        return JoinedGroup(group)
    outside: Any = dist.GroupMember.NON_GROUP_MEMBER
    if not hasattr(group, "all_reduce") and group == outside:
        raise InputError(
            "group: this rank is not in the process group; make the strategy only on the ranks of torch's new_group"
        )
    if not hasattr(group, "all_reduce"):
        raise InputError(
            f"group must be a torch process group (as from torch.distributed.new_group) or None for the default one, "
            f"got {type(group).__name__}"
        )
    return group


class JoinedGroup(TorchGroup):
    """The user's own group: it has no counter of claims, and `close` ends only those made from it by `new_group`.

    A group of NCCL alone has no collectives for host tensors, which small statistics are: those are sent by way of
    this rank's current CUDA device.
    """

    def __init__(self, process_group: Any) -> None:
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        self.generation = 0
        self.traffic = Traffic()
        self._lost = Lost()
        self._process_group = process_group
        config = dist.get_backend_config(process_group)
        self._backends = dict(pair.split(":") for pair in config.split(",") if ":" in pair)  # by kind of device
        self._has_host = "cpu" in self._backends
        self._gloo_devices = [device for device, name in self._backends.items() if name in ("gloo", BACKEND)]
        has_nccl = self._backends.get("cuda") == "nccl" and torch.cuda.is_available()
        self._nccl = torch.device("cuda", torch.cuda.current_device()) if has_nccl else None
        self._twins: list[JoinedGroup] = []

    def new_group(self) -> "JoinedGroup":
        """torch's own new_group wants every rank of the world, or with local synchronization as many groups on every
        rank: it names the group by their number. So this one is unknown to torch, under a name that the ranks agree on.
        """
        self._lost.check()
        name = broadcast_json(self, f"uneven/{uuid.uuid4().hex}")
        store = under(name, dist.distributed_c10d._get_process_group_store(self._process_group))
        twin = copy.copy(self)
        twin.traffic, twin._twins = Traffic(), []
        twin._process_group = _form(store, self.rank, self.world_size, self._backends)
        twin._connect()
        self._twins.append(twin)
        return twin

    def claim(self, count: int) -> int:
        raise RuntimeError(f"claim({count}): a group that was formed elsewhere has no counter; policies form their own")

    def abort(self, why: str) -> None:
        """Its waits raise; the user's connections stay."""
        self._lost.abort(why)

    def close(self) -> None:
        """Of the group itself nothing: whoever formed it ends it."""
        for twin in self._twins:
            twin.close()
            held, twin._process_group = [twin._process_group], None
            if twin._nccl is not None and not self._lost.is_lost:
                held[0].shutdown()
            free(held, self._lost.is_lost)
            twin._lost = Lost()
            twin._lost.close()
        self._twins.clear()

    def _start(self, collective: Any, tensor: Tensor, **options: Any) -> Work:
        collective = inspect.unwrap(collective)  # torch's wrapper hides an error by its own about a group unknown to it
        if tensor.is_cuda or self._has_host:
            return super()._start(collective, tensor, **options)
        self._lost.check()
        assert self._nccl is not None, "a group without host tensors has NCCL"
        moved = tensor.to(self._nccl)
        collective(moved, group=self._process_group, **options)
        tensor.copy_(moved)
        return SoloGroup().all_reduce(tensor)

    def _kind_of_work(self, tensor: Tensor) -> type[Work]:
        return GlooWork if tensor.device.type in self._gloo_devices else Work


def _form(store: Store, rank: int, size: int, backends: dict[str, str]) -> Any:
    """A torch process group outside of torch's list of groups; all of its ranks, and no others, call this."""
    made: dict[str, Any] = {}
    types = dist.Backend.backend_type_map
    group: Any = dist.ProcessGroup(store, rank, size)
    for device, name in backends.items():
        if name not in made:
            made[name] = _make_backend(name, under(name, store), rank, size)
        group._register_backend(torch.device(device), types[name], made[name])
    group._set_default_backend(types["nccl" if "nccl" in made else next(iter(made))])
    return group


def _make_backend(name: str, store: Store, rank: int, size: int) -> Any:
    if name in ("gloo", BACKEND):
        gloo: Any = dist.ProcessGroupGloo
        return gloo(store, rank, size, make_options(GROUP_TIMEOUT))
    if name in ("nccl", "xccl"):
        kind = getattr(dist.distributed_c10d, f"ProcessGroup{name.upper()}")
        options = kind.Options()
        options._timeout = GROUP_TIMEOUT
        return kind(store, rank, size, options)
    raise InputError(
        f"group: its backend is {name!r}, and FSDP needs a second group of the same ranks, which can be formed with "
        "'gloo' and 'nccl'; make the group with one of these, or use Zero2"
    )
