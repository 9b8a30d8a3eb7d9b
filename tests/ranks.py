"""Run a function on N ranks: as threads with a group of their own (0.03 s a test), or as real processes.

The thread group sums in rank order, so a test's result does not depend on scheduling.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from uneven.comm.lost import Lost
from uneven.comm.store import open_store
from uneven.comm.work import Traffic, Work
from uneven.errors import GroupLostError

ROOT = Path(__file__).parent.parent

T = TypeVar("T")


class _Meeting:
    """One collective: everyone brings a tensor, the last one computes, everyone takes the result."""

    def __init__(self, size: int) -> None:
        self.brought: dict[int, Tensor] = {}
        self.size = size
        self.done = threading.Event()
        self.is_off = False  # a rank has failed, and will not come

    def bring(self, rank: int, tensor: Tensor, compute: Callable[[list[Tensor]], Tensor], owner: int | None) -> None:
        """The result goes to all, or to the owner alone; the others then hold nothing that anybody may use."""
        self.brought[rank] = tensor
        if len(self.brought) == self.size and not self.is_off:
            shapes = {(tuple(t.shape), t.dtype) for t in self.brought.values()}
            assert len(shapes) == 1, f"ranks brought different tensors: {shapes}"
            result = compute([self.brought[rank].clone() for rank in range(self.size)])
            for place, tensor in self.brought.items():
                if owner is None or place == owner:
                    tensor.copy_(result)
                elif tensor.is_floating_point():
                    tensor.fill_(float("nan"))
            self.done.set()


def in_rank_order(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total += part
    return total


class _Room:
    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.meetings: dict[int, _Meeting] = {}
        self.claimed = 0
        self.twins: dict[int, _Room] = {}
        self.is_broken = False

    def meeting(self, number: int) -> _Meeting:
        found = self.meetings.setdefault(number, _Meeting(self.size))
        if self.is_broken:
            self._call_off(found)
        return found

    def fail(self) -> None:
        """A rank has failed: nobody waits for it."""
        with self.lock:
            self.is_broken = True
            for meeting in self.meetings.values():
                self._call_off(meeting)
        for twin in self.twins.values():
            twin.fail()

    @staticmethod
    def _call_off(meeting: _Meeting) -> None:
        if not meeting.done.is_set():
            meeting.is_off = True
            meeting.done.set()


class RankMissingError(GroupLostError):
    """Another rank failed; its own exception says why."""


class _ThreadWork:
    def __init__(self, meeting: _Meeting, lost: Lost) -> None:
        self._meeting, self._given_up = meeting, lost

    def wait(self) -> None:
        end = time.monotonic() + 150
        while not self._meeting.done.wait(0.02):
            self._given_up.check()
            assert time.monotonic() < end, "a rank did not come"
        if self._meeting.is_off:
            raise RankMissingError

    def is_completed(self) -> bool:
        return self._meeting.done.is_set()


class ThreadGroup:
    """A Group whose ranks are threads of this process."""

    generation = 0
    has_cheap_host_sums = False
    pretends_nccl = False  # use the collectives that are chosen for NCCL

    def __init__(self, room: _Room, rank: int, lost: Lost | None = None) -> None:
        self.rank = rank
        self.world_size = room.size
        self.traffic = Traffic()
        self._given_up = lost or Lost()
        self._room = room
        self._count = 0
        self._twins = 0

    def all_reduce(self, tensor: Tensor) -> Work:
        return self._meet(tensor, in_rank_order)

    def all_reduce_max(self, tensor: Tensor) -> Work:
        return self._meet(tensor, lambda parts: torch.stack(parts).amax(0))

    def broadcast(self, tensor: Tensor, owner: int = 0) -> Work:
        return self._meet(tensor, lambda parts: parts[owner])

    def reduce(self, tensor: Tensor, owner: int) -> Work:
        return self._meet(tensor, in_rank_order, owner)

    def is_nccl(self, tensor: Tensor) -> bool:
        return self.pretends_nccl

    def new_group(self) -> "ThreadGroup":
        self._twins += 1
        with self._room.lock:
            room = self._room.twins.setdefault(self._twins, _Room(self.world_size))
        return ThreadGroup(room, self.rank, self._given_up)

    def claim(self, many: int) -> int:
        with self._room.lock:
            self._room.claimed += many
            return self._room.claimed - many

    def abort(self, why: str) -> None:
        self._given_up.abort(why)

    def close(self) -> None: ...

    def _meet(self, tensor: Tensor, compute: Callable[[list[Tensor]], Tensor], owner: int | None = None) -> Work:
        self._given_up.check()
        with self._room.lock:
            meeting = self._room.meeting(self._count)
            self._count += 1
            meeting.bring(self.rank, tensor, compute, owner)
        return Work(_ThreadWork(meeting, self._given_up), tensor, self.traffic, self._given_up)


def on_threads(size: int, function: Callable[[ThreadGroup], T]) -> list[T]:
    """function(group) on every rank at once; the results in rank order, or the first exception."""
    room = _Room(size)

    def run(rank: int) -> T:
        try:
            return function(ThreadGroup(room, rank))
        except BaseException:
            room.fail()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    failed = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(failed, key=lambda error: isinstance(error, RankMissingError)):
        raise error
    return [future.result() for future in futures]


def on_processes(
    size: int,
    what: str,
    folder: Path,
    backend: str = "cpu",
    limit_s: float = 200,
    machines: Sequence[int] | None = None,
) -> list[Any]:
    """function(group) of `what` ("module:function") on every rank as a process; the results in rank order.

    Through shared memory, with backend 'gloo' over Gloo, or with 'nccl' over NCCL, all on one GPU. With `machines` as
    if each rank were on the machine of that number.
    """
    store, port = open_store()
    results = [folder / f"{rank}.pt" for rank in range(size)]
    command = [sys.executable, "-m", "tests.rank_process", str(port)]
    running = [
        subprocess.Popen(
            [*command, str(rank), str(size), what, str(result), backend, ",".join(map(str, machines or [0] * size))],
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank, result in enumerate(results)
    ]
    said = [process.communicate(timeout=limit_s)[1] for process in running]
    del store
    for process, words in zip(running, said, strict=True):
        assert process.returncode == 0, words
    return [torch.load(result, weights_only=False) for result in results]


class Silent:
    """A report that nobody reads."""

    def started(self, *_: Any) -> None: ...
    def stepped(self, *_: Any) -> None: ...
    def epoch_done(self, *_: Any) -> None: ...
    def say(self, *_: Any) -> None: ...
    def draw(self, *_: Any) -> None: ...
