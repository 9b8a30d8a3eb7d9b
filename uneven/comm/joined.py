"""A torch process group that somebody else has formed, as a Group: strategies run in loops that have one already.

Called where a strategy or an optimizer of parallel/ is made by hand. Ranks of a Group are counted inside the group;
torch counts those of a sub-group globally, and the translation is torch's own (`group_src`, `group_dst`).
"""

from typing import Any, Union

import torch
import torch.distributed as dist
from torch import Tensor

from uneven.comm.gloo_address import BACKEND
from uneven.comm.group import Group, SoloGroup, TorchGroup
from uneven.comm.lost import Lost
from uneven.comm.store import GROUP_TIMEOUT
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
    """The user's own group: it is not closed here, and has no counter of claims.

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
        backends = dict(pair.split(":") for pair in dist.get_backend_config(process_group).split(",") if ":" in pair)
        self._has_host = "cpu" in backends
        self._gloo_devices = [device for device, backend in backends.items() if backend in ("gloo", BACKEND)]
        has_nccl = backends.get("cuda") == "nccl" and torch.cuda.is_available()
        self._nccl = torch.device("cuda", torch.cuda.current_device()) if has_nccl else None

    def new_group(self) -> "JoinedGroup":
        ranks = dist.get_process_group_ranks(self._process_group)
        backend = dist.get_backend_config(self._process_group)
        # Local synchronization: ranks of the world that are not in this group do not call this.
        twin = JoinedGroup(dist.new_group(ranks, GROUP_TIMEOUT, backend, use_local_synchronization=True))
        twin._lost = self._lost
        twin._connect()
        return twin

    def claim(self, count: int) -> int:
        raise RuntimeError(f"claim({count}): a group that was formed elsewhere has no counter; policies form their own")

    def abort(self, why: str) -> None:
        """Its waits raise; the user's connections stay."""
        self._lost.abort(why)

    def close(self) -> None:
        """Nothing: whoever formed the group ends it."""

    def _start(self, collective: Any, tensor: Tensor, **options: Any) -> Work:
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
