"""Waiting for other ranks of this machine: shortly awake, then asleep, and awake again when one of them is gone.

Used by comm/shared_memory.py. A rank is gone when its process has ended, or when it has left the group, before it took
part in the collective that is waited for. What it sent before is still there and counts: so the semaphore is looked
at first, and the rank second.
"""

import select
import threading
import time
from collections.abc import Callable, Sequence

from uneven.comm.lost import SLICE_S
from uneven.comm.segment import Segment
from uneven.comm.semaphores import Semaphore
from uneven.comm.shared_ring import Layout
from uneven.errors import GroupLostError

SPIN_S = 100e-6  # about what it costs to be put to sleep and woken
DONE, LEFT = 0, 1  # numbers of a rank's state: pieces that it has finished, and whether it has left the group


class Peers:
    """The other ranks' processes. Nothing of it depends on who is a child of whom, or on signals."""

    def __init__(self, segment: Segment, layout: Layout, rank: int, timeout_s: float) -> None:
        self.rank, self._name = rank, layout.name
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

    def sleep(self, semaphore: Semaphore, awaited: int, meanwhile: Callable[[], None]) -> None:
        """Until rank `awaited` has posted the semaphore; GroupLostError where it, or another that it needs, is gone.

        `meanwhile` is called between the slices. A peer that ended is found after two of them.
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
            meanwhile()

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
