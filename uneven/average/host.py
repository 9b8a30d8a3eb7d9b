"""Host averaging: a snapshot of the params leaves, the weighted average comes back, and training goes on between.

A thread of its own, on a group of its own, does the travelling. Phases: idle -> collecting (waiting until every rank
has entered the round) -> computing (the sum of the params) -> idle. First a small sum carries every rank's row, weight
and buffers: when it is back everyone has come, so waiting and transfer are measured apart; then the params follow,
each rank's already multiplied by its weight over the total. Work done while an average travels is kept:
params += average - snapshot. A rank that did none takes the average itself, so that replicas end bit-equal.
"""

import queue
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from uneven.average.buffers import BufferAverage
from uneven.average.replica import Flat, Replica
from uneven.comm.group import Group
from uneven.errors import RankError

EXTRA = 3  # numbers that travel with a rank's row: its weight, whether it is broken, its last average's checksum


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
class _Journey:
    """One round on its way; the thread fills in the second half."""

    row: list[float]
    weight: float
    is_broken: bool
    buffers: Tensor
    checksum: int
    left_ns: int
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    head: Tensor | None = None  # everybody's rows, and the sum of the buffers
    total: float = 0.0
    divergence: float = 0.0
    met_ns: int = 0
    back_ns: int = 0


class HostAverage:
    """Contract: `start`, then `finish`, in turn, the same number of times on every rank; `is_done` between them.

    `verify` compares checksums along the way: what was snapshot is what is sent, what arrived is what is merged, and
    every rank got the same average. A difference ends the run and names the stage.
    """

    def __init__(self, replica: Replica, buffers: BufferAverage, group: Group, verify: bool = False) -> None:
        self._replica, self._buffers, self._group, self._verify = replica, buffers, group, verify
        self._snapshot, self._average = replica.flat(), replica.flat()
        self.traffic = group.traffic
        self._last_checksum = 0
        self._row_length = EXTRA
        self._journey: _Journey | None = None
        self._jobs: queue.SimpleQueue[_Journey | None] = queue.SimpleQueue()
        self.phase = "idle"
        self._thread = threading.Thread(target=self._work, name="uneven-average", daemon=True)
        self._thread.start()

    def start(self, weight: float, row: Sequence[float]) -> None:
        """Take the snapshot and send it on its way; `weight` is what this rank trained since the last one."""
        assert self._journey is None, "one round in flight"
        self._replica.take(self._snapshot)
        # The largest magnitude is finite exactly when all numbers are.
        is_broken = self._snapshot.numbers.numel() > 0 and not bool(self._snapshot.numbers.abs().max().isfinite())
        if is_broken:
            self._snapshot.numbers.zero_()
            weight = 0.0
        checksum = _checksum(self._snapshot) if self._verify else 0
        buffers = self._buffers.pack(weight)
        journey = _Journey(list(row), weight, is_broken, buffers, checksum, time.perf_counter_ns())
        self._journey = journey
        self._jobs.put(journey)

    def is_done(self) -> bool:
        return self._journey is not None and self._journey.done.is_set()

    def wait(self) -> None:
        assert self._journey is not None, "a round must be started first"
        self._journey.done.wait()

    def finish(self, is_unchanged: bool) -> Arrived:
        """Wait for the average and merge it; `is_unchanged` says that this rank trained nothing since `start`."""
        self.wait()
        journey, self._journey = self._journey, None
        assert journey is not None, "waited for"
        if journey.error is not None:
            raise journey.error
        arrived = self._read(journey)
        if self._verify and journey.total:
            self._compare("the average changed between its arrival and its merge", _checksum(self._average))
        if journey.total:
            if is_unchanged or journey.is_broken:
                self._replica.put(self._average)
            else:
                torch.sub(self._average.numbers, self._snapshot.numbers, out=self._snapshot.numbers)
                self._replica.add(self._snapshot)
        if journey.is_broken:
            self._replica.clear_state()
        assert journey.head is not None, "a journey without error has its head"
        self._buffers.unpack(journey.head[self._rows_size :], journey.total)
        return arrived

    def close(self) -> None:
        """No round is in flight any more."""
        self._jobs.put(None)
        self._thread.join()

    @property
    def _rows_size(self) -> int:
        return self._group.size * self._row_length

    def _work(self) -> None:
        while (journey := self._jobs.get()) is not None:
            try:
                self._travel(journey)
            except BaseException as error:  # raised by `finish`, in the thread that trains
                journey.error = error
            self.phase = "idle"
            journey.done.set()

    def _travel(self, journey: _Journey) -> None:
        self.phase = "collecting"
        own = [*journey.row, journey.weight, float(journey.is_broken), float(self._last_checksum)]
        self._row_length = len(own)
        rows = torch.zeros(self._group.size, len(own), dtype=torch.float64)
        rows[self._group.rank] = torch.tensor(own, dtype=torch.float64)
        journey.head = self._group.sum_(torch.cat([rows.flatten(), journey.buffers])).wait()
        journey.met_ns = time.perf_counter_ns()
        self.phase = "computing"
        weights = journey.head[: self._rows_size].view(self._group.size, -1)[:, -EXTRA]
        journey.total = float(weights.sum())
        if journey.total:
            if self._verify and _checksum(self._snapshot) != journey.checksum:
                raise RankError("verify: the snapshot changed between its taking and its sending")
            torch.mul(self._snapshot.numbers, journey.weight / journey.total, out=self._average.numbers)
            self._group.sum_(self._average.numbers).wait()
            journey.divergence = _divergence(self._snapshot, self._average, journey.is_broken)
            self._last_checksum = _checksum(self._average) if self._verify else 0
        journey.back_ns = time.perf_counter_ns()

    def _read(self, journey: _Journey) -> Arrived:
        assert journey.head is not None, "a journey without error has its head"
        rows = journey.head[: self._rows_size].view(self._group.size, -1).tolist()
        broken = [rank for rank, row in enumerate(rows) if row[-2]]
        for rank, row in enumerate(rows):
            if row[-1] != rows[0][-1]:
                raise RankError(f"verify: rank {rank} had another average than rank 0 in the round before")
        if broken and not journey.total:
            raise RankError(
                f"no rank has finite params any more (first rank {broken[0]}): the learning rate may be too high, or a "
                "batch holds numbers that are not finite"
            )
        return Arrived(
            [row[:-EXTRA] for row in rows],
            broken,
            journey.divergence,
            journey.left_ns,
            journey.met_ns,
            journey.back_ns,
        )

    def _compare(self, what: str, checksum: int) -> None:
        if checksum != self._last_checksum:
            raise RankError(f"verify: {what}")


def _checksum(flat: Flat) -> int:
    return zlib.crc32(flat.numbers.numpy().tobytes())


def _divergence(snapshot: Flat, average: Flat, is_broken: bool) -> float:
    size = float(torch.linalg.vector_norm(average.numbers))
    if is_broken or size == 0.0:
        return 0.0
    return float(torch.linalg.vector_norm(snapshot.numbers - average.numbers)) / size
