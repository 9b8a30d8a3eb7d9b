"""Form this rank's group from the rendezvous store: NCCL, shared memory, Gloo, or both. Called by launch/context.py."""

import os
from collections.abc import Sequence

import torch

from uneven.comm.group import Group, SoloGroup, TorchGroup
from uneven.comm.hierarchy import join_machines
from uneven.comm.shared_memory import share
from uneven.comm.store import Store


def form_group(
    store: Store,
    rank: int,
    size: int,
    device: torch.device,
    backend: str,
    is_crowded: bool,
    *,
    machines: Sequence[int] | None = None,
    verify: bool = False,
) -> Group:
    """`backend` is 'nccl', 'shm', 'gloo', or 'cpu': shared memory where it is possible, else Gloo, as with 'shm'.

    `machines` has each rank's machine; without it all are on one. On several, 'cpu' is shared memory on each machine
    and Gloo between them. `is_crowded`: ranks of this machine share a GPU. `verify`: messages through shared memory
    carry checksums.
    """
    if size == 1:
        return SoloGroup()
    if backend == "nccl":
        if is_crowded:
            _allow_shared_gpu(rank)
        return TorchGroup(store, rank, size, device)
    gloo = TorchGroup(store, rank, size)
    if backend == "gloo":
        return gloo
    num_machines = 1 if machines is None else len(set(machines))
    if machines is None or num_machines == 1:
        return share(gloo, store, device, verify=verify)
    return gloo if num_machines == size else join_machines(gloo, store, device, machines, verify)


def _allow_shared_gpu(rank: int) -> None:
    """NCCL refuses two ranks on one GPU unless they seem to be on two hosts. Slow, but the results are the same."""
    os.environ.update({"NCCL_HOSTID": f"uneven-{rank}", "NCCL_IB_DISABLE": "1"})
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # one is set already where ranks are on several machines
