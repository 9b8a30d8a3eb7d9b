"""Averaging params in the background, for LocalSGD: training goes on while a snapshot is averaged over all ranks.

A thread of its own, on a process group of its own, does the communication. Phases: idle -> collecting (waiting until
every rank has entered the round) -> computing (the sum of the params) -> idle. First a small all-reduce carries every
rank's row, weight and buffers: when it has returned, every rank has entered the round, so waiting and transfer are
measured apart. Then the params follow, each rank's multiplied by its weight over the total.

[Note: merge rule] What a rank trains while its snapshot is averaged is kept: params += average - snapshot. A rank that
trained nothing meanwhile takes the average itself, so that replicas end bit-equal (a sum of a difference would round).
Optimizer state and buffers are overwritten, see Replica.merge. tests/average/test_background.py holds the rule.

From `start` until the round is done the transport's flat buffers belong to the averaging thread; before and after
that, to the caller.

[Note: a round counts or it does not] A round is committed on a rank when its last sum has completed there. Until then
nothing is changed that a rank could not go back to: the snapshot, the last average that was agreed upon (in another
buffer than the sum) and the buffers' last averages stay as they are. Where ranks are lost with a round in flight, some
have it and others do not: `abandon` tells which, and train/settle.py brings the rest up to it by
`roll_forward`. tests/average/test_abandoned.py fails either sum on some ranks only.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from uneven.average.buffers import AveragedBuffers, BufferAverage
from uneven.average.replica import Flat, Replica, is_finite
from uneven.average.transport import Transport, make_transport
from uneven.average.verify import CHANGED_BEFORE, CHANGED_SINCE, ODD_AVERAGE, judge
from uneven.comm.gather import checksum, gather_rows, own_row
from uneven.comm.group import Group
from uneven.comm.host_copy import copy_to_host_async
from uneven.errors import GroupLostError, NotFiniteError, RankError

EXTRA = 2  # numbers at the end of a rank's row: its weight, and whether its snapshot was not finite


@dataclass(frozen=True)
class RoundResult:
    """A finished round: `rows` is the same on every rank, the rest is this rank's own."""

    rows: list[list[float]]
    divergence: float  # ||snapshot - average|| / ||average||
    snapshot_ns: int  # when the snapshot was taken ...
    joined_ns: int  # ... when every rank had entered the round
    done_ns: int  # ... when the average was ready


@dataclass
class _Round:
    """One round in flight: what is sent and, once `done` is set, what was received."""

    row: Callable[[], Sequence[float]]
    weight: float
    buffers: Callable[[], Tensor]
    snapshot_ns: int
    checksum: Callable[[], Tensor] | None  # of the snapshot when it was taken, with verify
    average: Flat  # where the params are summed
    is_broken: bool = False
    is_abandoned: bool = False  # nobody waits for it: what is received now is thrown away
    is_committed: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    rows: list[list[float]] = field(default_factory=list)
    total_weight: float = 0.0
    averaged_buffers: AveragedBuffers | None = None
    divergence: float = 0.0
    merge_checksums: list[int] = field(default_factory=list)  # of average and delta, with verify
    joined_ns: int = 0
    done_ns: int = 0


class BackgroundAverage:
    """Life cycle: `start`, then `finish`, in turn and equally often on every rank; `is_done` between them; `close`.

    Or `abandon`, where a rank is lost: then the group is of no use, and another BackgroundAverage goes on with the same
    replica, transport and buffers.

    `verify` compares checksums on the way: the snapshot taken is the one sent and, after the sum, still the same, every
    rank has the same average, and the average received is the one merged. Until then nobody counts the round. A
    difference raises and names rank and stage: RankError on the rank that is wrong, GroupLostError on the others
    (average/verify.py).
    """

    def __init__(
        self, replica: Replica, transport: Transport, buffers: BufferAverage, group: Group, verify: bool = False
    ) -> None:
        self.replica = replica
        self.transport = transport
        self._buffers = buffers
        self._group = group
        self._verify = verify
        self.traffic = group.traffic
        self.phase = "idle"
        self._round: _Round | None = None
        self._late: _Round | None = None  # abandoned; its snapshot may be merged yet
        self._is_abandoned = False
        self._committing = threading.Lock()
        self._queue: queue.SimpleQueue[_Round | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="uneven-average", daemon=True)
        self._thread.start()

    def in_group(self, group: Group) -> "BackgroundAverage":
        """Another one, which goes on with this one's memory in a group of its own."""
        return BackgroundAverage(self.replica, self.transport, self._buffers, group, self._verify)

    def start(self, weight: float, row: Callable[[], Sequence[float]]) -> None:
        """Take a snapshot and start to average it; `weight` is what this rank has trained since the last one.

        `row` is called by the averaging thread, once the snapshot can be read.
        """
        assert self._round is None, "one round in flight"
        self.transport.take_snapshot()
        checksum = copy_to_host_async(_checksum(self.transport.device_snapshot.buffer)) if self._verify else None
        buffers, now_ns = self._buffers.snapshot_async(), time.perf_counter_ns()
        self._round = _Round(row, weight, buffers, now_ns, checksum, self.transport.average)
        self.phase = "collecting"
        self._queue.put(self._round)

    def is_done(self) -> bool:
        return self._round is not None and self._round.done.is_set()

    def wait(self) -> None:
        assert self._round is not None, "a round must be started first"
        self._round.done.wait()

    def finish(self, is_unchanged: bool) -> RoundResult:
        """Wait for the average and merge it; `is_unchanged`: this rank has trained nothing since `start`.

        Raises what the averaging thread raised, such as the loss of another rank.
        """
        self.wait()
        round_ = self._round
        assert round_ is not None
        if round_.error is not None:
            raise round_.error
        self._round = None
        result = _result_of(round_)
        if round_.total_weight:
            if self._verify and self._merge_checksums() != round_.merge_checksums:
                stage = "the average changed between its arrival and its merge"
                raise RankError(f"verify: rank {self._group.rank}: {stage}")
            self._merge(is_unchanged)
        assert round_.averaged_buffers is not None, "they came with the rows"
        self._buffers.load(round_.averaged_buffers)
        return result

    def abandon(self) -> bool:
        """Nothing that this group has on its way will arrive; returns whether a round was committed here before.

        Such a round is merged by `finish`, like any other. One that was not may still be committed elsewhere, and then
        `roll_forward` merges it; its snapshot is kept for that. Ends the thread, or leaves it to itself where it is
        stuck in a sum. May be called again. RankError where this rank itself is what `verify` found to be wrong.
        """
        self._queue.put(None)
        self._is_abandoned = True
        round_ = self._round
        with self._committing:
            is_committed = round_ is not None and round_.is_committed
            if round_ is not None and not is_committed:
                round_.is_abandoned = True
        if is_committed:
            self.wait()
        elif round_ is not None:
            if isinstance(round_.error, RankError) and not isinstance(round_.error, GroupLostError):
                raise round_.error  # the others may have begun a new generation with this rank before it could fail
            self._round, self._late = None, round_
            self.transport.renew()
            self.phase = "idle"
        return is_committed

    def roll_forward(self, agreed_buffers: Tensor, is_unchanged: bool) -> None:
        """Merge the round that was abandoned here: its average was written to `transport.average` by another rank's.

        `is_unchanged` as in `finish`; `agreed_buffers` is BufferAverage.agreed of the rank that has merged it.
        """
        self.transport.wait_for_snapshot()
        with self.transport.stream():
            snapshot = self.transport.snapshot.buffer
            if self._late is not None and self._has_changed(self._late, snapshot):
                raise RankError("verify: " + CHANGED_SINCE.format(odd=self._group.rank))
            torch.sub(self.transport.average.buffer, snapshot, out=snapshot)
            self.transport.copy_to_device()
        self._merge(is_unchanged)
        self._buffers.take(agreed_buffers)

    def _merge(self, is_unchanged: bool) -> None:
        if is_unchanged:  # [Note: merge rule]
            self.replica.load(self.transport.device_average)
        else:
            self.replica.merge(self.transport.device_average, delta=self.transport.delta)
        self.transport.keep()

    def close(self) -> None:
        """End the thread. If a round is in flight it ends after that, and is not waited for."""
        self._queue.put(None)
        is_over = self._round is None or self._round.done.is_set()  # also one that has failed
        if is_over and not self._is_abandoned:
            self._thread.join()

    def _run(self) -> None:
        if self.replica.device.type == "cuda":
            torch.cuda.set_device(self.replica.device)  # else this thread would take memory of the first GPU
        while (round_ := self._queue.get()) is not None:
            try:
                if not round_.is_abandoned:
                    self._average(round_)
            except BaseException as error:  # raised by `finish`, in the training thread
                round_.error = error
            if round_.is_abandoned:
                return
            self.phase = "idle"
            round_.done.set()

    def _average(self, round_: _Round) -> None:
        self.transport.wait_for_snapshot()  # [Note: snapshot synchronisation] in transport.py
        buffers = round_.buffers()
        with self.transport.stream():
            snapshot = self.transport.snapshot.buffer
            round_.is_broken = not (is_finite(snapshot) and self._buffers.is_finite(buffers))
            self._all_reduce_rows(round_, buffers)
            has_params = round_.total_weight > 0 and not _broken_ranks(round_)
            if has_params and not round_.is_abandoned:
                self._all_reduce_params(round_, snapshot)
            if not self._commit(round_):
                return
            if has_params:
                self._make_delta(round_, snapshot)
            self.transport.copy_to_device()
        round_.done_ns = time.perf_counter_ns()

    def _commit(self, round_: _Round) -> bool:
        """From here on the round counts, unless nobody waits for it any more: then its buffers belong to others."""
        with self._committing:
            round_.is_committed = not round_.is_abandoned
            return round_.is_committed

    def _all_reduce_rows(self, round_: _Round, buffers: Tensor) -> None:
        """The small sum; when it has returned, every rank has entered the round."""
        table = own_row(self._group, [*round_.row(), round_.weight, float(round_.is_broken)])
        packed = torch.cat([table.flatten(), self._buffers.pack(buffers, round_.weight)])
        total = self._group.all_reduce(packed).wait()
        round_.joined_ns = time.perf_counter_ns()
        self.phase = "computing"
        round_.rows = total[: table.numel()].view(table.shape).tolist()
        round_.total_weight = sum(row[-2] for row in round_.rows)
        round_.averaged_buffers = self._buffers.unpack(total[table.numel() :], round_.total_weight)

    def _all_reduce_params(self, round_: _Round, snapshot: Tensor) -> None:
        """The weighted sum of all ranks' snapshots; with verify all ranks have compared it."""
        average = round_.average.buffer
        if self._has_changed(round_, snapshot):
            raise RankError("verify: " + CHANGED_BEFORE.format(odd=self._group.rank))
        torch.mul(snapshot, round_.weight / round_.total_weight, out=average)
        self._group.all_reduce(average).wait()
        if self._verify:
            self._compare_averages(average, self._has_changed(round_, snapshot))

    def _make_delta(self, round_: _Round, snapshot: Tensor) -> None:
        """Turn this rank's snapshot into the delta to the average."""
        average = round_.average.buffer
        torch.sub(average, snapshot, out=snapshot)
        norm = float(torch.linalg.vector_norm(average))
        if norm:
            round_.divergence = float(torch.linalg.vector_norm(snapshot)) / norm
        if self._verify:
            round_.merge_checksums = [int(_checksum(buffer)) for buffer in (average, snapshot)]

    def _has_changed(self, round_: _Round, snapshot: Tensor) -> bool:
        """With verify: whether this rank's snapshot has other bits than when it was taken."""
        return round_.checksum is not None and bool(round_.checksum() != _checksum(snapshot).cpu())

    def _compare_averages(self, average: Tensor, is_suspect: bool) -> None:
        """`is_suspect`: this rank's snapshot has changed since it was sent, so the delta would be wrong, too."""
        rows = gather_rows(self._group, [float(checksum([average])), float(is_suspect)])
        suspects = [rank for rank, (_, has_changed) in enumerate(rows) if has_changed]
        judge([int(row[0]) for row in rows], self._group.rank, ODD_AVERAGE, suspects, can_redo=True)

    def _merge_checksums(self) -> list[int]:
        return [int(_checksum(flat.buffer)) for flat in (self.transport.device_average, self.transport.delta)]


def make_average(
    model: nn.Module,
    optimizer: Optimizer,
    buffers: BufferAverage,
    group: Group,
    with_state: bool,
    is_nccl: bool,
    verify: bool,
) -> BackgroundAverage:
    """Of a model's params and, `with_state`, of what the optimizer keeps for them."""
    replica = Replica(model, optimizer, with_state)
    return BackgroundAverage(replica, make_transport(replica, is_nccl), buffers, group, verify)


def _result_of(round_: _Round) -> RoundResult:
    if broken := _broken_ranks(round_):
        # Steps that are not finite are skipped, so an update has overflowed; nothing is averaged with such params.
        raise NotFiniteError(
            f"rank {broken[0]} has params or buffers that are not finite though its losses and gradients were: the "
            "learning rate may be too high"
        )
    rows = [row[:-EXTRA] for row in round_.rows]
    return RoundResult(rows, round_.divergence, round_.snapshot_ns, round_.joined_ns, round_.done_ns)


def _broken_ranks(round_: _Round) -> list[int]:
    return [rank for rank, row in enumerate(round_.rows) if row[-1]]


def _checksum(values: Tensor) -> Tensor:
    """Of all bits and their order, the same on every device; does not wait for the device."""
    bits = values.view(torch.int32).to(torch.int64)
    return (bits * torch.arange(1, 2 * len(bits), 2, device=bits.device)).sum()
