"""A connection that lasts for a whole run: signs of life in both directions, messages in between.

The leader has one per joined machine, that machine has one to the leader. A side that is silent for too long is lost,
however that came: ended, suspended, or a cable that was pulled, which no socket notices by itself.
"""

import queue
import threading
import time
from contextlib import suppress
from typing import Any

from uneven.machines.messages import FROM_LEADER, Fields, checked
from uneven.machines.wire import BadMessageError, Connection, WireError

INTERVAL_S = 1.0
STARTING_S = 60.0  # loading torch from a cold disk stops every thread of a process for a while
RUNNING_S = 5.0
MOST_WAITING = 100  # messages that nobody has taken; the other side waits then


class Session:
    """Life cycle: from the handshake to `close()`. Any thread may send; one takes the messages."""

    def __init__(self, connection: Connection, fields: Fields = FROM_LEADER) -> None:
        """`fields` are those that the other side may send."""
        self.own_address, self.address = connection.own_address, connection.peer_address
        self._limit_s = STARTING_S
        self.why_lost: str | None = None  # why nothing can come any more
        self._connection = connection
        self._inbox: queue.Queue[dict[str, Any] | None] = queue.Queue(MOST_WAITING)
        self._fields = fields
        self._closed = threading.Event()
        for target in (self._read, self._tell):
            threading.Thread(target=target, name="uneven-session", daemon=True).start()

    def watch(self) -> None:
        """Neither side loads torch any more: from now on the other one is lost after a few seconds of silence."""
        self._limit_s = RUNNING_S

    def send(self, **message: Any) -> None:
        """Does not raise where the other side is gone: `why_lost` says so soon."""
        with suppress(WireError):
            self._connection.send(**message)

    def take(self, timeout_s: float = 0.0) -> dict[str, Any] | None:
        """The next message, or None where none comes in time or none can come any more."""
        with suppress(queue.Empty):
            return self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait()
        return None

    def expect(self, *keys: str, timeout_s: float) -> dict[str, Any]:
        """The next message, which must have one of these keys; WireError where it has not, or none comes in time."""
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            message = self.take(min(0.5, timeout_s))  # in slices: Ctrl-C must get through
            if message is not None:
                if not any(key in message for key in keys):
                    raise WireError(f"expected {' or '.join(keys)} and got {', '.join(message)}"[:200])
                return message
            if self.why_lost is not None and self._inbox.empty():
                raise WireError(self.why_lost)
        raise WireError(f"no {' or '.join(keys)} within {timeout_s:g} s")

    def wait_closed(self, seconds: float) -> None:
        """Until the other side has closed it."""
        end_s = time.monotonic() + seconds
        while self.why_lost is None and time.monotonic() < end_s:
            time.sleep(0.02)

    def end(self, why: str) -> None:
        """It has sent what does not fit: nothing of it is read any more."""
        self.why_lost = self.why_lost or why
        self.close()

    def close(self) -> None:
        self._closed.set()
        self._connection.close()

    def _read(self) -> None:
        try:
            while True:
                message = self._connection.read(self._limit_s)
                if "alive" not in message:
                    self._deliver(checked(message, self._fields))
        except WireError as error:
            silent = f"nothing was heard for {self._limit_s:g} s"
            self.why_lost = self.why_lost or (silent if "in time" in str(error) else str(error))
            with suppress(queue.Full):  # then somebody takes what came before, and looks
                self._inbox.put_nowait(None)
            if isinstance(error, BadMessageError):
                self.close()

    def _deliver(self, message: dict[str, Any]) -> None:
        while not self._closed.is_set():
            with suppress(queue.Full):
                self._inbox.put(message, timeout=INTERVAL_S)
                return

    def _tell(self) -> None:
        while not self._closed.wait(INTERVAL_S) and self.why_lost is None:
            self.send(alive=1)
