"""The memory that ranks of one machine share: made by rank 0, mapped by all, gone with the last process that maps it.

It is a memfd: it has no name, so nothing stays behind however the processes end, and Docker's small /dev/shm does not
limit it. It is preallocated: a lack of memory is an error here, not a SIGBUS later. The other ranks open it through
/proc while rank 0 holds it open, which works for processes of one user in one container; wherever it does not,
`share_segment` returns why, on every rank the same, and the caller takes Gloo.
"""

import json
import mmap
import os
import secrets
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from uneven.comm import semaphores
from uneven.comm.store import Forming, Store

TOKEN_BYTES = 16  # at the start of the mapping: the memory is the one that rank 0 has made


class Segment:
    """A mapping of `size` bytes; with `device` a CUDA device it is page-locked there, for asynchronous copies.

    `pidfds` are the processes of the other ranks, and `cores` counts the cores that all may use together. Tensors on
    the memory must be gone before `close`.
    """

    def __init__(self, fd: int, size: int, device: torch.device | None = None) -> None:
        self.pidfds: dict[int, int] = {}
        self.cores = 0
        self.size = size
        self._mapping = mmap.mmap(fd, size)
        self._is_locked = self._is_closed = False
        if device is not None and device.type == "cuda":
            with torch.cuda.device(device):
                error = int(torch.cuda.cudart().cudaHostRegister(self.address, size, 0))
            if error:
                raise OSError(f"cudaHostRegister failed with {error}")
            self._is_locked = True

    @property
    def is_open(self) -> bool:
        return not self._is_closed

    @property
    def address(self) -> int:
        return self.bytes(0, 1).data_ptr()

    def bytes(self, start: int, count: int) -> Tensor:
        return torch.frombuffer(self._mapping, dtype=torch.uint8, count=count, offset=start)

    def numbers(self, start: int, count: int) -> "memoryview[int]":
        """`count` integers of 64 bits."""
        return memoryview(self._mapping)[start : start + 8 * count].cast("q")

    def close(self) -> None:
        self._is_closed = True
        if self._is_locked:
            self._is_locked = False
            torch.cuda.cudart().cudaHostUnregister(self.address)
        while self.pidfds:
            os.close(self.pidfds.popitem()[1])
        with suppress(BufferError):  # a tensor is still there: unmapped with it
            self._mapping.close()


def share_segment(
    store: Store,
    rank: int,
    world_size: int,
    size: int,
    prepare: Callable[[Segment], None],
    device: torch.device | None = None,
    forming: Forming | None = None,
) -> Segment | str:
    """The memory of these ranks, or on every rank the same reason why there is none. Called on all ranks at once.

    `store` has the keys of this call alone. Rank 0 calls `prepare` before the others use the memory. GroupLostError
    where a peer does not come, as `forming` says; nothing is left of the memory then.
    """
    forming = forming or Forming()
    fd, facts = _offer(size) if rank == 0 else (None, _own_facts())
    found: Segment | str = ""
    try:
        everyone = _exchange(store, "facts", rank, world_size, facts, forming)
        found = _map(rank, everyone, fd, size, device)
        if fd is not None and isinstance(found, Segment):
            prepare(found)
        reasons = _exchange(store, "ready", rank, world_size, found if isinstance(found, str) else "", forming)
    except BaseException:
        if isinstance(found, Segment):
            found.close()
        raise
    finally:
        if fd is not None:
            os.close(fd)
    failed = [(number, reason) for number, reason in enumerate(reasons) if reason]
    if not failed and isinstance(found, Segment):
        return found
    if isinstance(found, Segment):
        found.close()
    number, reason = failed[0]
    return reason if len(failed) == world_size else f"{reason} (rank {number})"


def why_impossible() -> str:
    """Why this process cannot share memory with others in this way, '' if it can."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return "this system has no memfd"
    if not semaphores.is_available():
        return "this C library has no semaphores between processes"
    try:
        os.close(os.pidfd_open(os.getpid()))
        os.close(os.memfd_create("uneven"))
        os.readlink("/proc/self/ns/pid")
    except OSError as error:
        return f"this system refuses it: {error}"
    return ""


def _own_facts() -> dict[str, Any]:
    """What must be equal on all ranks for them to share memory, and this process's number and cores."""
    if reason := why_impossible():
        return {"reason": reason}
    boot, namespace = Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")
    same = {"machine": boot, "user": os.getuid(), "pid namespace": namespace}
    return {"same": same, "pid": os.getpid(), "cores": sorted(os.sched_getaffinity(0))}


def _offer(size: int) -> tuple[int | None, dict[str, Any]]:
    """Rank 0's part: the memory, held open, and where the others find it."""
    facts = _own_facts()
    if "reason" in facts:
        return None, facts
    fd = None
    try:
        fd = os.memfd_create("uneven")
        os.posix_fallocate(fd, 0, size)
        token = secrets.token_bytes(TOKEN_BYTES)
        os.pwrite(fd, token, 0)
    except OSError as error:
        if fd is not None:
            os.close(fd)
        return None, {"reason": f"{size >> 20} MB of shared memory: {error.strerror}"}
    return fd, {**facts, "fd": fd, "token": token.hex()}


def _map(
    rank: int, everyone: list[dict[str, Any]], fd: int | None, size: int, device: torch.device | None
) -> Segment | str:
    """This rank's mapping, or why not."""
    first = everyone[0]
    for facts in everyone:
        if "reason" in facts:
            return str(facts["reason"])
    for number, facts in enumerate(everyone):
        if different := [name for name, value in first["same"].items() if value != facts["same"][name]]:
            return f"rank {number} has another {different[0]} than rank 0"
    opened = segment = None
    try:
        if rank:
            opened = fd = os.open(f"/proc/{first['pid']}/fd/{first['fd']}", os.O_RDWR | os.O_CLOEXEC)
            if os.pread(opened, TOKEN_BYTES, 0).hex() != first["token"]:
                return "rank 0's memory is not to be found"
        assert fd is not None, "rank 0 has said that it has none"
        segment = Segment(fd, size, device)
        for other, facts in enumerate(everyone):
            if other != rank:
                segment.pidfds[other] = os.pidfd_open(facts["pid"])
    except OSError as error:
        if segment is not None:
            segment.close()
        return str(error)
    finally:
        if opened is not None:
            os.close(opened)
    segment.cores = len({core for facts in everyone for core in facts["cores"]})
    return segment


def _exchange(store: Store, what: str, rank: int, world_size: int, own: Any, forming: Forming) -> list[Any]:
    """Every rank's value, in rank order."""
    store.set(f"{what}/{rank}", json.dumps(own))
    keys = [f"{what}/{other}" for other in range(world_size)]
    forming.wait(store, keys)
    return [json.loads(store.get(key)) for key in keys]
