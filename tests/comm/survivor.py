"""A rank that goes on when others are lost: `main` runs in a process of its own, told what to do by its arguments.

Four ranks form generation 0. Rank 3 is killed in the middle of a sum, and the others form generation 1; rank 2 is
stopped in the middle of a sum, ranks 0 and 1 are told to abort, and form generation 2. When rank 2 goes on it finds
that it was given up. Used by test_generations.py.
"""

import os
import signal
import sys
import threading
import time

import torch
from torch import Tensor

from uneven.comm.form import form_group
from uneven.comm.group import Group
from uneven.comm.store import reach_store, under
from uneven.errors import GroupLostError

NUMEL = 1_000_000  # larger than a ring of shared memory or the buffers of a socket


def form(port: int, backend: str, machines: list[int], rank: int, generation: int) -> Group:
    store = under(f"run/1/g/{generation}", reach_store("127.0.0.1", port))
    size, device = len(machines), torch.device("cpu")
    return form_group(store, rank, size, device, backend, False, machines=machines, generation=generation)


def sum_until_lost(group: Group, signal_: int | None) -> tuple[list[Tensor], str]:
    """The rank that is lost has started the first sum and not the second: one of both raises on every other rank.

    Returns the buffers as well: nothing may write them any more.
    """
    buffers = [torch.ones(NUMEL), torch.ones(NUMEL)]
    twin = group.new_group()
    try:
        assert group.all_reduce(torch.ones(3)).wait().tolist() == [float(group.world_size)] * 3
        first = group.all_reduce(buffers[0])
        if signal_ is not None:
            os.kill(os.getpid(), signal_)
        first.wait()
        twin.all_reduce(buffers[1]).wait()
    except GroupLostError as error:
        began = time.monotonic()
        group.close()
        assert time.monotonic() - began < 30, "it waited for somebody"
        for lost in (group, twin):
            try:
                lost.all_reduce(torch.ones(1)).wait()
            except RuntimeError:
                continue
            raise AssertionError("a group that was left summed up") from None
        return buffers, str(error)
    raise AssertionError("all ranks were there")


def main() -> None:
    port, rank, backend = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    machines = [int(machine) for machine in sys.argv[4].split(",")]
    torch.set_num_threads(1)
    group = form(port, backend, machines, rank, 0)
    old, said = sum_until_lost(group, signal.SIGKILL if rank == 3 else None)
    print(type(group).__name__, said, flush=True)
    kept = [buffer.clone() for buffer in old]

    group = form(port, backend, machines[:3], rank, 1)
    asked = threading.Thread(target=lambda g=group: g.abort(sys.stdin.readline().strip()), daemon=True)
    if rank != 2:
        asked.start()
    newer, said = sum_until_lost(group, signal.SIGSTOP if rank == 2 else None)
    print(type(group).__name__, said, flush=True)
    old += newer
    kept += [buffer.clone() for buffer in newer]
    if rank == 2:
        os._exit(0)

    group = form(port, backend, machines[:2], rank, 2)
    assert group.generation == group.new_group().generation == 2
    total = group.all_reduce(torch.full((NUMEL,), 1.0 + rank)).wait()
    print(type(group).__name__, set(total.tolist()), flush=True)
    asked.join()
    sys.stdin.readline()  # rank 2 has gone on meanwhile, and ended
    total = group.all_reduce(torch.full((NUMEL,), 1.0 + rank)).wait()
    same = all(torch.equal(now, then) for now, then in zip(old, kept, strict=True))
    print(set(total.tolist()), same, sorted([group.claim(1) >= 0]), flush=True)
    group.close()
    os._exit(0)
