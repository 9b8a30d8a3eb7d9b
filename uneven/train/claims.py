"""This rank's claims of slots, for LocalSGD: waited for on the training thread, or made by a thread of its own.

policy/claims.py decides which; here are the thread, the clock and the timeline. A claim is a round trip to the
rendezvous store, and Group.claim has a connection of its own, so that neither thread waits for the other's requests.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from uneven.policy.claims import MEMORY, typical_ms
from uneven.timeline.record import Recorder

CLOSE_S = 1.0  # how long `close` waits for a claim on its way; a store that does not answer must not hold up the end


@dataclass
class _Claim:
    """A claim on its way; once `done` is set, its reply."""

    count: int
    done: threading.Event = field(default_factory=threading.Event)
    first: int = 0
    error: BaseException | None = None


class ClaimSource(Protocol):
    """A Group, as far as claims need it."""

    def claim(self, count: int) -> int: ...


class SlotClaims:
    """Life cycle: `claim`, or `ask` and then `take`, in any order; `close` once nothing more is claimed.

    The thread starts with the first `ask`: ranks near the store have none. Invariant: at most one claim is on its way,
    so the numbers that this rank gets only grow. Time that the training thread waits for a claim is `communication` on
    the timeline, and `take_waited_ns` returns it, because it is no work of this rank's.
    """

    def __init__(self, source: ClaimSource, recorder: Recorder) -> None:
        self._source = source
        self._recorder = recorder
        self._waited_ns = 0
        self._trips_ms: deque[float] = deque(maxlen=MEMORY)
        self._is_connected = False
        self._on_its_way: _Claim | None = None
        self._queue: queue.SimpleQueue[_Claim | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def trip_ms(self) -> float:
        return typical_ms(tuple(self._trips_ms))

    def claim(self, count: int) -> int:
        """Claim so many slots now and wait for the reply: the first of their numbers."""
        assert self._on_its_way is None, "a claim on its way is taken first"
        return self._wait_for(lambda: self._make(count))

    def ask(self, count: int) -> None:
        assert self._on_its_way is None, "one claim on its way"
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="uneven-claims", daemon=True)
            self._thread.start()
        self._on_its_way = _Claim(count)
        self._queue.put(self._on_its_way)

    def is_there(self) -> bool:
        return self._on_its_way is not None and self._on_its_way.done.is_set()

    def take(self) -> int:
        """The reply to the claim on its way. Raises what its thread raised, such as the loss of the store."""
        claim = self._on_its_way
        assert claim is not None, "nothing was asked for"
        if not claim.done.is_set():
            self._wait_for(claim.done.wait)
        self._on_its_way = None
        if claim.error is not None:
            raise claim.error
        return claim.first

    def take_waited_ns(self) -> int:
        """How long the training thread has waited for claims since the last call."""
        waited_ns, self._waited_ns = self._waited_ns, 0
        return waited_ns

    def close(self) -> None:
        """End the thread; a claim on its way is waited for, but not for long. May be called twice."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(CLOSE_S)

    def _wait_for(self, reply: Callable[[], int]) -> int:
        recorder = self._recorder
        before = recorder.state
        began_ns = recorder.enter("communication")
        try:
            return reply()
        finally:
            self._waited_ns += recorder.enter(before) - began_ns

    def _run(self) -> None:
        while (claim := self._queue.get()) is not None:
            try:
                claim.first = self._make(claim.count)
            except BaseException as error:  # raised by `take`, in the training thread
                claim.error = error
            claim.done.set()

    def _make(self, count: int) -> int:
        """The claim itself, timed on whichever thread makes it."""
        began_ns = self._recorder.clock()
        first = self._source.claim(count)
        if self._is_connected:  # the first claim connects
            self._trips_ms.append((self._recorder.clock() - began_ns) / 1e6)
        self._is_connected = True
        return first
