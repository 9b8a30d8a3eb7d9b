"""Averaging in the background: a snapshot of the params leaves, the weighted average comes back, training goes on.

A thread of its own, on a group of its own, does the travelling. Phases: idle -> collecting (waiting until every rank
has entered the round) -> computing (the sum of the params) -> idle. First a small sum carries every rank's row, weight
and buffers: when it is back everyone has come, so waiting and transfer are measured apart; then the params follow, by
the road that fits the device, each rank's already multiplied by its weight over the total. Work done while an average
travels is kept: params += average - snapshot. A rank that did none takes the average itself, so that replicas end
bit-equal.

From `start` until the round is done the road's numbers are the thread's own; before and after that, the caller's.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from uneven.average.buffers import BufferAverage
from uneven.average.replica import Replica
from uneven.average.transport import Transport
from uneven.comm.gather import gather_checksums, own_row
from uneven.comm.group import Group
from uneven.comm.host_copy import copy_to_host_async
from uneven.errors import RankError

EXTRA = 2  # numbers that travel with a rank's row: its weight, and whether it is broken


@dataclass(frozen=True)
class Arrived:
    """A round's outcome: `rows` and `broken` are the same on every rank, the rest is this rank's own."""

    rows: list[list[float]]
    broken: list[int]  # ranks whose snapshot was not finite
    divergence: float  # ||snapshot - average|| / ||average||
    left_ns: int  # when the snapshot was taken ...
    met_ns: int  # ... when every rank had come
    back_ns: int  # ... when the average was there


@dataclass
class _Round:
    """One round on its way: what leaves, and from `done` on what came back."""

    row: Callable[[], Sequence[float]]
    weight: float
    buffers: Callable[[], Tensor]
    left_ns: int
    checksum: Callable[[], Tensor] | None  # of what was taken, where that is to be verified
    is_broken: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    rows: list[list[float]] = field(default_factory=list)
    total: float = 0.0  # of everybody's weights
    averaged_buffers: list[Tensor | None] = field(default_factory=list)
    divergence: float = 0.0
    to_merge: list[int] = field(default_factory=list)  # checksums of what is to be merged
    met_ns: int = 0
    back_ns: int = 0


class BackgroundAverage:
    """Contract: `start`, then `finish`, in turn, the same number of times on every rank; `is_done` between them.

    `verify` compares checksums along the way: what was taken is what is sent, every rank got the same average, and
    what arrived is what is merged. A difference ends the run and names the stage.
    """

    def __init__(
        self, replica: Replica, transport: Transport, buffers: BufferAverage, group: Group, verify: bool = False
    ) -> None:
        self._replica, self.transport, self._buffers, self._group, self._verify = (
            replica,
            transport,
            buffers,
            group,
            verify,
        )
        self.traffic = group.traffic
        self.phase = "idle"
        self._round: _Round | None = None
        self._jobs: queue.SimpleQueue[_Round | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="uneven-average", daemon=True)
        self._thread.start()

    def start(self, weight: float, row: Callable[[], Sequence[float]]) -> None:
        """Take the snapshot and send it on its way; `weight` is what this rank trained since the last one.

        `row` is asked by the thread, when the snapshot has landed.
        """
        assert self._round is None, "one round in flight"
        self.transport.take()
        checksum = copy_to_host_async(_checksum(self.transport.taken.numbers)) if self._verify else None
        self._round = _Round(row, weight, self._buffers.leave(), time.perf_counter_ns(), checksum)
        self.phase = "collecting"
        self._jobs.put(self._round)

    def is_done(self) -> bool:
        return self._round is not None and self._round.done.is_set()

    def wait(self) -> None:
        assert self._round is not None, "a round must be started first"
        self._round.done.wait()

    def finish(self, is_unchanged: bool) -> Arrived:
        """Wait for the average and merge it; `is_unchanged` says that this rank trained nothing since `start`.

        Raises what went wrong on the way, such as the loss of another rank.
        """
        self.wait()
        round_, self._round = self._round, None
        assert round_ is not None, "waited for"
        if round_.error is not None:
            raise round_.error
        arrived = _read(round_)
        if round_.total:
            if self._verify and self._checksums_to_merge() != round_.to_merge:
                raise RankError("verify: the average changed between its arrival and its merge")
            if is_unchanged or round_.is_broken:
                self._replica.put(self.transport.merged)
            else:
                self._replica.merge(self.transport.merged, change=self.transport.change)
        if round_.is_broken:
            self._replica.clear_state()
        self._buffers.put(round_.averaged_buffers)
        return arrived

    def close(self) -> None:
        """End the thread. One whose round is in flight ends when that is back, and is not waited for."""
        self._jobs.put(None)
        if self._round is None:
            self._thread.join()

    def _work(self) -> None:
        if self._replica.device.type == "cuda":
            torch.cuda.set_device(self._replica.device)  # else this thread would take memory of the first GPU
        while (round_ := self._jobs.get()) is not None:
            try:
                self._travel(round_)
            except BaseException as error:  # raised by `finish`, in the thread that trains
                round_.error = error
            self.phase = "idle"
            round_.done.set()

    def _travel(self, round_: _Round) -> None:
        self.transport.land()
        buffers = round_.buffers()
        with self.transport.at_work():
            snapshot = self.transport.snapshot.numbers
            round_.is_broken = not (_is_finite(snapshot) and self._buffers.is_finite(buffers))
            if round_.is_broken:
                snapshot.zero_()
                round_.weight = 0.0
            self._meet(round_, buffers)
            if round_.total:
                self._exchange(round_)
            self.transport.load()
        round_.back_ns = time.perf_counter_ns()

    def _meet(self, round_: _Round, buffers: Tensor) -> None:
        """The small sum; when it is back, every rank has entered the round."""
        table = own_row(self._group, [*round_.row(), round_.weight, float(round_.is_broken)])
        head = self._group.all_reduce(torch.cat([table.flatten(), self._buffers.pack(buffers, round_.weight)])).wait()
        round_.met_ns = time.perf_counter_ns()
        self.phase = "computing"
        round_.rows = head[: table.numel()].view(table.shape).tolist()
        round_.total = sum(row[-2] for row in round_.rows)
        round_.averaged_buffers = self._buffers.bring(head[table.numel() :], round_.total)

    def _exchange(self, round_: _Round) -> None:
        """The weighted sum of everybody's snapshot; this rank's own becomes what that average changes in it."""
        snapshot, average = self.transport.snapshot.numbers, self.transport.average.numbers
        if round_.checksum is not None and not round_.is_broken and round_.checksum() != _checksum(snapshot).cpu():
            raise RankError("verify: the snapshot changed between its taking and its sending")
        torch.mul(snapshot, round_.weight / round_.total, out=average)
        self._group.all_reduce(average).wait()
        torch.sub(average, snapshot, out=snapshot)
        size = float(torch.linalg.vector_norm(average))
        if size and not round_.is_broken:
            round_.divergence = float(torch.linalg.vector_norm(snapshot)) / size
        if self._verify:
            self._compare_averages()
            round_.to_merge = [int(_checksum(numbers)) for numbers in (average, snapshot)]

    def _compare_averages(self) -> None:
        checksums = gather_checksums(self._group, [self.transport.average.numbers])
        for rank, checksum in enumerate(checksums):
            if checksum != checksums[0]:
                raise RankError(f"verify: rank {rank} has another average than rank 0")

    def _checksums_to_merge(self) -> list[int]:
        return [int(_checksum(flat.numbers)) for flat in (self.transport.merged, self.transport.change)]


def _read(round_: _Round) -> Arrived:
    broken = [rank for rank, row in enumerate(round_.rows) if row[-1]]
    if broken and not round_.total:
        raise RankError(
            f"every rank that trained has params that are not finite (first rank {broken[0]}): the learning rate may "
            "be too high, or a batch holds numbers that are not finite"
        )
    rows = [row[:-EXTRA] for row in round_.rows]
    return Arrived(rows, broken, round_.divergence, round_.left_ns, round_.met_ns, round_.back_ns)


def _is_finite(numbers: Tensor) -> bool:
    # A finite sum has finite parts, and costs a fraction of asking each; a large sum of finite ones is asked again.
    return bool(numbers.sum().isfinite()) or bool(numbers.isfinite().all())


def _checksum(numbers: Tensor) -> Tensor:
    """Of all bits and their order, the same on every device; a device is not waited for."""
    bits = numbers.view(torch.int32).to(torch.int64)
    return (bits * torch.arange(1, 2 * len(bits), 2, device=bits.device)).sum()
