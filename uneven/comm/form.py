"""Form this rank's group from the rendezvous store: NCCL, shared memory, Gloo, or both. Called by launch/.

The first generation of a run has torch's default group in it, for PyTorch's own strategies and the user's code. Later
ones never touch torch's default group: it exists once per process, and cannot be formed anew beside a peer that hangs.
"""

import os
from collections.abc import Callable, Sequence

import torch

from uneven.comm.group import Group, SoloGroup
from uneven.comm.hierarchy import join_machines
from uneven.comm.shared_memory import share
from uneven.comm.store import REFORM_TIMEOUT, Forming, Store
from uneven.comm.torch_group import GlooGroup, TorchGroup
from uneven.errors import RankError


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
    generation: int = 0,
    is_stale: Callable[[], bool] = lambda: False,
) -> Group:
    """`backend` is 'nccl', 'shm', 'gloo', or 'cpu': shared memory where it is possible, else Gloo, as with 'shm'.

    `machines` has each rank's machine; without it all are on one. On several, 'cpu' is shared memory on each machine
    and Gloo between them. `is_crowded`: ranks of this machine share a GPU. `verify`: messages through shared memory
    carry checksums.

    `generation`: its number in the run; `store` has the keys of this generation alone. A later one than the first is
    given up with a GroupLostError where a peer does not come soon, or where `is_stale` says, which is asked meanwhile
    by the calling thread, that a newer one is wanted; then nothing of it is left. Groups made by its `new_group`
    likewise. With 'nccl' there is none: RankError.
    """
    if size == 1:
        return SoloGroup(generation)
    if backend == "nccl":
        if generation:
            # A kernel that waits for the lost peer may not end by an abort, see TorchGroup; where it does, with
            # undefined values, the optimizer's step is enqueued behind it.
            raise RankError("a rank is lost: with backend='nccl' the others cannot go on without it; use backend='cpu'")
        if is_crowded:
            _allow_shared_gpu(rank)
        return TorchGroup(store, rank, size, device)
    forming = Forming(REFORM_TIMEOUT, is_stale) if generation else Forming()
    gloo = GlooGroup(store, rank, size, generation, forming) if generation else TorchGroup(store, rank, size)
    group: Group = gloo
    num_machines = 1 if machines is None else len(set(machines))
    try:
        if backend != "gloo" and (machines is None or num_machines == 1):
            group = share(gloo, store, device, verify=verify, forming=forming)
        elif backend != "gloo" and machines is not None and num_machines < size:
            group = join_machines(gloo, store, device, machines, verify, forming=forming)
        if group is gloo and isinstance(gloo, GlooGroup):
            gloo.connect()
    except BaseException:
        gloo.close()
        raise
    return group


def _allow_shared_gpu(rank: int) -> None:
    """NCCL refuses two ranks on one GPU unless they seem to be on two hosts. Slow, but the results are the same."""
    os.environ.update({"NCCL_HOSTID": f"uneven-{rank}", "NCCL_IB_DISABLE": "1"})
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # one is set already where ranks are on several machines
