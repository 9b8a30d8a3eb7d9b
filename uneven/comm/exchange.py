"""Collectives through memory that all ranks of one machine map: who sends what to whom, and who sums it up.

Used by comm/shared_memory.py. There is no thread and no socket. A tensor is cut into pieces; every rank starts the same
collectives with tensors of the same size, so all number the pieces alike, and finish them in this order. A piece is
finished in one of these ways:

- exchanged: every rank sends its values to all others and sums up all of them. All sums of two ranks, and small ones.
- owned: the piece's owner sums up what the others sent, and sends the sum. Pieces take turns with their owners, so the
  traffic does not grow with the square of the ranks.
- broadcast: the owner sends its values. Reduce: the owner sums up, and nobody else gets the sum.

[Note: order of sums] Always in rank order, first rank 0's and rank 1's values, so that all ranks get the same bits, and
a replay those of the recorded run. Results are written to the caller's tensor, which is never a view of the memory.

[Note: progress] Nothing blocks before `wait`: a collective sends what there is room for when it is started, and the
rest is sent, summed up and received by later calls, at the latest in its own `wait`, which finishes all earlier ones
first. A CUDA tensor is copied by the stream that was current when its collective was started; `wait` returns when all
that is left to do is enqueued there.

[Note: who is gone] A rank is gone when its process has ended, or when it has left the group, before it took part in the
collective that is waited for. What it sent before is still there and counts: so the semaphore is looked at first, and
the rank second.
"""

import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from uneven.comm.lost import SLICE_S, Lost
from uneven.comm.segment import Segment
from uneven.comm.semaphores import Semaphore
from uneven.comm.shared_ring import ALIGN, ENTRIES, Inbox, Layout, Outbox, Views
from uneven.errors import GroupLostError

SPIN_S = 100e-6  # about what it costs to be put to sleep and woken
DONE, LEFT = 0, 1  # numbers of a rank's state: pieces that it has finished, and whether it has left the group
LEAST_BYTES = 16 * 2**10  # of a piece that is worth an owner; smaller tensors are exchanged

Combine = Callable[..., Tensor]
_NO_STREAM = nullcontext()


@dataclass(frozen=True)
class Sizes:
    """Bytes of each rank's ring and of a piece; the same on all ranks."""

    ring: int
    piece: int

    def ahead(self, world_size: int) -> int:
        """How many pieces may be sent before the first of them is finished.

        With owners a rank may hold in its ring what it sent of twice as many pieces, and the sums of as many: if there
        is room for all of them, nobody waits for room while another waits for a sum (test: larger than the ring).
        """
        pieces = self.ring // self.piece - 1  # one may be lost where the ring begins anew
        assert pieces >= 6, f"a ring of {self.ring} bytes is too small for pieces of {self.piece}"
        return ENTRIES if world_size == 2 else pieces // 3 - 1


# The rings stay in the machine's cache, and a piece takes much longer to sum than to find in Python.
HOST_SIZES = Sizes(ring=16 * 2**20, piece=2**20)
# Where a rank has a CUDA device each piece is a copy of its own, and copies run beside backward.
DEVICE_SIZES = Sizes(ring=48 * 2**20, piece=4 * 2**20)


@dataclass(eq=False)
class _Piece:
    values: Tensor
    owner: int | None  # None: exchanged
    combine: Combine | None  # None: broadcast
    has_result: bool  # the owner sends it to all
    collective: "_Collective"
    is_small: bool


class _Collective:
    """A collective that was started, for `Work`."""

    def __init__(self, all_of_group: "Exchange", tensor: Tensor) -> None:
        self._all, self._tensor = all_of_group, tensor
        values = tensor.detach() if tensor.requires_grad else tensor
        is_contiguous = values.is_contiguous()
        # Each of these operations takes as long as a small message.
        self.flat = values if is_contiguous and values.dim() == 1 else values.contiguous().view(-1)
        self._back = None if is_contiguous else values
        self.left = 0  # pieces
        self.stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
        self._done: torch.cuda.Event | None = None

    def piece_done(self, read: torch.cuda.Event | None) -> None:
        """Called inside the stream; `read` is an event there after the piece was written, if there is one."""
        self.left -= 1
        if self.left:
            return
        if self._back is not None:
            self._back.copy_(self.flat.view(self._back.shape))
        if self.stream is not None:
            self._done = read if self._back is None else None
            if self._done is None:
                self._done = torch.cuda.Event()
                self._done.record(self.stream)

    def wait(self) -> None:
        self._all.finish(self)
        if self.stream is not None:
            current = torch.cuda.current_stream(self._tensor.device)
            if current != self.stream and self._done is not None:
                current.wait_event(self._done)

    def is_completed(self) -> bool:
        self._all.progress()
        return not self.left and self._all.is_posted and (self._done is None or self._done.query())


class Peers:
    """The other ranks' processes, and waiting for them: shortly awake, then asleep, awake again when one is gone.

    Nothing of it depends on who is a child of whom, or on signals. `meanwhile` is called now and then while it waits.
    """

    def __init__(
        self,
        segment: Segment,
        layout: Layout,
        rank: int,
        timeout_s: float,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank = rank
        self._meanwhile = meanwhile
        self._name = layout.name
        self._timeout_s = timeout_s
        self._states = [segment.numbers(layout.state(other), 2) for other in range(layout.world_size)]
        self._done = 0
        # A rank that waits uses its core: not where there is none to spare.
        self._spin_s = SPIN_S if segment.cores >= layout.world_size else 0.0
        self._pidfds = dict(segment.pidfds)
        self._poll = select.poll()
        for fd in self._pidfds.values():
            self._poll.register(fd, select.POLLIN)

    def finished(self) -> None:
        """This rank has done its part of one more piece."""
        self._done += 1
        self._states[self.rank][DONE] = self._done

    def spin(self, is_there: Callable[[], bool]) -> bool:
        """Look for a moment, awake; returns whether it came."""
        # A background thread does not spin: its core is the one that trains.
        if self._spin_s and threading.current_thread() is threading.main_thread():
            end = time.perf_counter() + self._spin_s
            while time.perf_counter() < end:
                if is_there():
                    return True
        return False

    def sleep(self, semaphore: Semaphore, awaited: int, check: Callable[[], None]) -> None:
        """Until rank `awaited` has posted the semaphore; GroupLostError where it, or another that it needs, is gone.

        `check`, between the slices, may raise. A peer that ended is found after two of them.
        """
        if self.spin(semaphore.try_wait):
            return
        end = time.monotonic() + self._timeout_s
        gone: Sequence[int] = ()
        while not semaphore.wait(SLICE_S):
            before, gone = gone, self._gone()
            # Twice: what a rank posted just before it ended may be seen a moment later than its end.
            if lost := [other for other in gone if other in before]:
                rank = awaited if awaited in lost else lost[0]
                raise GroupLostError(f"rank {self._name(rank)} has left: connection closed by peer (shared memory)")
            if time.monotonic() > end:
                minutes = self._timeout_s / 60
                raise GroupLostError(
                    f"no answer from peer rank {self._name(awaited)} for {minutes:g} minutes (shared memory)"
                )
            check()
            self._meanwhile()

    def close(self) -> None:
        """Tell the others that this rank has left. Its segment is closed next."""
        self._states[self.rank][LEFT] = 1
        self._states.clear()

    def _gone(self) -> list[int]:
        """Ranks that will not do their part of the next piece."""
        ended = {fd for fd, _ in self._poll.poll(0)}
        return [
            other
            for other, fd in self._pidfds.items()
            if (fd in ended or self._states[other][LEFT]) and self._states[other][DONE] <= self._done
        ]


class Exchange:
    """This rank's part of all collectives of a group: what is to be sent and what is to be finished, in order.

    Any thread may call it, one at a time.
    """

    def __init__(
        self, segment: Segment, layout: Layout, peers: Peers, sizes: Sizes, verify: bool, lost: Lost | None = None
    ) -> None:
        self.rank = peers.rank
        self.world_size = layout.world_size
        # A value's lane to or from a rank has the rank's number.
        self._others = tuple(other for other in range(self.world_size) if other != self.rank)
        self._results = tuple(layout.lane(other, True) for other in range(self.world_size))
        self._other_results = tuple(self._results[other] for other in self._others)
        self._segment = segment
        self._sizes = sizes
        self._peers = peers
        self._ahead = sizes.ahead(self.world_size)
        self._views = Views(segment)
        self._outbox = Outbox(segment, layout, self.rank, self._views, verify)
        self._inbox = Inbox(segment, layout, self.rank, self._views, verify)
        self._unsent: deque[_Piece] = deque()
        self._unfinished: deque[_Piece] = deque()  # ends with those that are unsent
        self._reading: deque[tuple[torch.cuda.Event | None, int]] = deque()  # messages that a device still copies
        self._count = 0  # pieces so far, for their owners
        self._lost = lost or Lost()  # of all groups that were formed together; this one may be closed alone
        self._is_closed = False
        self._lock = threading.Lock()

    def start(self, tensor: Tensor, combine: Combine | None, owner: int | None, has_result: bool = True) -> _Collective:
        """`owner` None: all ranks get the result, and pieces take turns with their owners where they have one."""
        with self._lock:
            self._check_open()
            collective = _Collective(self, tensor)
            size = collective.flat.numel() * collective.flat.element_size()
            is_exchanged = owner is None and (self.world_size == 2 or size <= LEAST_BYTES)
            for values in self._pieces(collective.flat, size):
                own = None if is_exchanged else self._count % self.world_size if owner is None else owner
                self._count += 1
                piece = _Piece(values, own, combine, has_result, collective, size <= LEAST_BYTES)
                collective.left += 1
                self._unsent.append(piece)
                self._unfinished.append(piece)
            self._progress()
            return collective

    def progress(self) -> None:
        """Whatever can be done without waiting; nothing where another thread is at it."""
        if self._lock.acquire(blocking=False):
            try:
                if not self._is_closed and self._lost.error is None:
                    self._progress()
            finally:
                self._lock.release()

    @property
    def is_posted(self) -> bool:
        return self._outbox.is_posted

    def finish(self, collective: _Collective) -> None:
        with self._lock:
            while collective.left or not self._outbox.is_posted:
                self._check_open()
                if not self._progress():
                    self._wait()

    def close(self) -> None:
        """Leave the group. A thread that waits in it raises, a moment later."""
        self._is_closed = True
        if self._lock.acquire(timeout=4 * SLICE_S):  # a thread that waits is out of it after one
            self._release()
            self._lock.release()

    def _check_open(self) -> None:
        if self._is_closed:
            self._release()
        self._lost.check()
        if self._is_closed:
            raise RuntimeError("the group was closed")

    def _release(self) -> None:
        if self._segment.is_open:
            self._unsent.clear()
            self._unfinished.clear()
            with suppress(RuntimeError):  # a device that has failed copies nothing any more
                self._outbox.synchronize()
                while self._reading:
                    self._free_read(wait=True)
            self._peers.close()
            self._inbox.close()
            self._outbox.close()
            self._views.clear()
            self._segment.close()

    def _pieces(self, flat: Tensor, size: int) -> Sequence[Tensor]:
        """A tensor of medium size is cut so that all ranks own a part of it."""
        if not size:
            return ()
        most = self._sizes.piece
        if self.world_size > 2:
            part = -(-size // (self.world_size * ALIGN)) * ALIGN
            most = min(most, max(part, LEAST_BYTES))
        return (flat,) if size <= most else flat.split(most // flat.element_size())

    def _progress(self) -> bool:
        """Send and finish what can be; whether there was anything."""
        before = (len(self._unsent), len(self._unfinished), len(self._reading))
        has_posted = self._outbox.post(wait=False)
        self._free_read(wait=False)
        if self._unsent and len(self._unfinished) > len(self._unsent) and self._unsent[0].is_small:
            self._send()  # a few numbers, for which all others wait, before the sum of what was sent before
        # A piece is summed up soon after it was sent, while it is in the cache. Others are sent while it has to wait.
        while (len(self._unfinished) > len(self._unsent) and self._finish_next()) or self._send():
            pass
        return has_posted or before != (len(self._unsent), len(self._unfinished), len(self._reading))

    def _wait(self) -> None:
        """For whatever `_progress` needs next."""
        if self._outbox.post(wait=True):
            return
        if self._reading:
            # Before this rank sleeps: others may wait for what it has read. That is a sleep, too, for the device.
            if len(self._unsent) == len(self._unfinished) or not self._peers.spin(self._can_finish_next):
                self._free_read(wait=True)
            return
        if len(self._unsent) == len(self._unfinished):
            self._outbox.wait(self._sleep)
            return
        for lane in self._writers(self._unfinished[0]):
            self._inbox.wait(lane, self._sleep)

    def _sleep(self, semaphore: Any, awaited: int) -> None:
        self._peers.sleep(semaphore, awaited, self._check_open)

    def _send(self) -> bool:
        """The next piece, if there is room; those of a device all at once, for it copies them by itself."""
        has_sent = False
        while self._unsent and len(self._unfinished) - len(self._unsent) < self._ahead:
            piece = self._unsent[0]
            if (lanes := self._readers(piece)) and not self._put(piece, lanes):
                break
            self._unsent.popleft()
            has_sent = True
            if piece.collective.stream is None:
                break
        return has_sent

    def _put(self, piece: _Piece, lanes: tuple[int, ...]) -> bool:
        with on_stream(piece.collective.stream):
            return self._outbox.send(piece.values, lanes, self._record)

    def _readers(self, piece: _Piece) -> tuple[int, ...]:
        """The lanes in which this rank sends its values."""
        if piece.owner is None:
            return self._others
        is_broadcast = piece.combine is None
        if piece.owner == self.rank:
            return self._others if is_broadcast else ()
        return () if is_broadcast else (piece.owner,)

    def _writers(self, piece: _Piece) -> tuple[int, ...]:
        """The lanes that must have a message for this rank to finish the piece."""
        if piece.owner is None:
            return self._others
        is_broadcast = piece.combine is None
        if piece.owner == self.rank:
            return () if is_broadcast else self._others
        return (piece.owner,) if is_broadcast else (self._results[piece.owner],) if piece.has_result else ()

    def _can_finish_next(self) -> bool:
        return all(self._inbox.has(lane) for lane in self._writers(self._unfinished[0]))

    def _finish_next(self) -> bool:
        piece = self._unfinished[0]
        lanes = self._writers(piece)
        if not all(self._inbox.has(lane) for lane in lanes):
            return False
        with on_stream(piece.collective.stream):
            if piece.owner is not None and piece.owner != self.rank:
                for lane in lanes:
                    piece.values.copy_(self._receive(piece, lane), non_blocking=True)
            elif lanes:
                self._sum(piece)
            event = self._read(piece, lanes)
            if piece.owner == self.rank and piece.combine is not None and piece.has_result:
                while not self._outbox.send(piece.values, self._other_results, self._record):
                    if not self._outbox.post(wait=True):
                        self._outbox.wait(self._sleep)
            self._unfinished.popleft()
            piece.collective.piece_done(event)
        self._peers.finished()
        return True

    def _receive(self, piece: _Piece, lane: int) -> Tensor:
        return self._inbox.receive(lane, piece.values.dtype, piece.values.numel())

    def _sum(self, piece: _Piece) -> None:
        """[Note: order of sums]"""
        own, combine = piece.values, piece.combine
        assert combine is not None
        total: Tensor | None = None
        for rank in range(self.world_size):
            part = own if rank == self.rank else self._receive(piece, rank)
            if own.is_cuda and part is not own:
                part = torch.empty_like(own).copy_(part, non_blocking=True)
            if total is None:
                total = part
                continue
            out = own if total is own or part is own else torch.empty_like(own)
            total = combine(total, part, out=out)

    def _read(self, piece: _Piece, lanes: tuple[int, ...]) -> torch.cuda.Event | None:
        """The messages are read, or will be by the stream: their writers may write over them then, in order.

        Returns the event that tells so, where there is one.
        """
        if not piece.values.is_cuda and not self._reading:
            for lane in lanes:
                self._inbox.free(lane)
            return None
        event = self._record() if piece.values.is_cuda and lanes else None
        self._reading.extend((event, lane) for lane in lanes)
        return event

    def _free_read(self, wait: bool) -> None:
        """Free what was read; with `wait` at least one message."""
        while self._reading:
            event, lane = self._reading[0]
            if event is not None and not event.query():
                if not wait:
                    return
                event.synchronize()
            self._reading.popleft()
            self._inbox.free(lane)
            wait = False

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)
        event.record()
        return event


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    """To make a stream current takes longer than to see that it is."""
    is_current = stream is None or stream == torch.cuda.current_stream(stream.device)
    return _NO_STREAM if is_current else torch.cuda.stream(stream)
