"""Heartbeats: each rank writes its status to the launcher's store a few times a second, and reads the stop request.

A thread with a store client of its own does both, so that a rank inside a long step still sends heartbeats, and one
that is stopped or dead does not. launch/watch/watch.py is the reader. Without a store there is no launcher any more:
the rank is an orphan, and `on_orphaned` ends it.
"""

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from uneven.comm.store import Store, get_text

INTERVAL_S = 0.2
STOP_KEY = "stop"
TERMINATED = "SIGTERM"  # the stop request's text where SIGTERM is its cause; any other is a Ctrl-C
SIGNAL_KEY = "signal"  # set by a rank that got one, to its number
SAVE_KEY = "save"  # how many checkpoints were asked for
GENERATION_KEY = "generation"  # the number of the newest roster; not set while it is the first
LEAVE, STAY = "leave", "stay"  # what a member is asked for, under `leave_key`


def heartbeat_key(member: str) -> str:
    """Where a member's heartbeats are: its identity, since its rank may change."""
    return f"heartbeat/{member}"


def roster_key(generation: int) -> str:
    """Where a generation's roster is, before GENERATION_KEY names it."""
    return f"roster/{generation}"


def suspicion_key(generation: int, member: str) -> str:
    """Where a member writes why the group of a generation is lost to it."""
    return f"suspect/{generation}/{member}"


def ready_key(member: str) -> str:
    """Where somebody who joins writes that it is warmed up and measured."""
    return f"ready/{member}"


def leave_key(member: str) -> str:
    """Where a member reads that it is to leave, or to stay after all."""
    return f"leave/{member}"


def handed_key(generation: int, member: str) -> str:
    """Where a member that leaves writes how many samples it has trained and handed in."""
    return f"handed/{generation}/{member}"


def settled_key(generation: int, member: str) -> str:
    """Where a member writes when it trains in a generation."""
    return f"settled/{generation}/{member}"


@dataclass(frozen=True, kw_only=True)
class HeartbeatCalls:
    """What a heartbeat reads of its rank, and what it calls there, on its own thread."""

    read_status: Callable[[], dict[str, Any]] = dict
    on_stop: Callable[[bool], None] = lambda _: None  # once; whether it is a SIGTERM
    on_orphaned: Callable[[], None] = lambda: None  # there is no launcher any more
    on_save: Callable[[], None] = lambda: None  # whenever another checkpoint is asked for
    read_signal: Callable[[], int] = lambda: 0  # one that this process has got
    on_generation: Callable[[str], None] = lambda _: None  # the text of a new roster
    on_leave: Callable[[bool], None] = lambda _: None  # whether this rank is to leave, whenever that changes


class Heartbeat:
    """Writes the rank's status under the member's key until `close()`, and passes on what is asked of it.

    Once `read_signal()` is not 0, the launcher is asked to stop all ranks. A guest's status says so instead: its
    machine has joined, and it alone is to leave.
    """

    def __init__(self, store: Store, member: str, calls: HeartbeatCalls, *, is_guest: bool = False) -> None:
        self._store, self._calls = store, calls
        self._key = heartbeat_key(member)
        self._leave_key = leave_key(member)
        self._is_guest = is_guest
        self._saves = self._generation = "0"
        self._is_leaving = self._was_stop_read = self._has_ended = False
        self._count = 0
        self._sending = threading.Lock()  # one newer status after the other
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="uneven-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and sends the last status, which says that this process ends as it should."""
        self._closed.set()
        self._thread.join()
        self._has_ended = True
        self._send()

    def beat(self) -> None:
        """Send what is so now, on the caller's thread. A launcher that is gone is noticed by our own."""
        with suppress(RuntimeError):
            self._send()

    def _run(self) -> None:
        self._exchange()  # at once: only a rank that was seen can be missed
        while not self._closed.wait(INTERVAL_S):
            self._exchange()

    def _exchange(self) -> None:
        try:
            self._send()
            if not self._was_stop_read and not self._is_guest and (number := self._calls.read_signal()):
                self._store.set(SIGNAL_KEY, str(int(number)))
            stop = None if self._was_stop_read else get_text(self._store, STOP_KEY)
            saves = get_text(self._store, SAVE_KEY) or "0"
            generation = get_text(self._store, GENERATION_KEY) or "0"
            is_leaving = get_text(self._store, self._leave_key) == LEAVE
            roster = "" if generation == self._generation else get_text(self._store, roster_key(int(generation))) or ""
        except RuntimeError:
            self._calls.on_orphaned()
            return
        if roster:
            self._generation = generation
            self._calls.on_generation(roster)
        if is_leaving != self._is_leaving:
            self._is_leaving = is_leaving
            self._calls.on_leave(is_leaving)
        if stop is not None:
            self._was_stop_read = True
            self._calls.on_stop(stop == TERMINATED)
        if saves != self._saves:
            self._saves = saves
            self._calls.on_save()

    def _send(self) -> None:
        with self._sending:
            self._count += 1
            # Whether it was sent after the stop request was read: the watch trusts no older one to tell what has begun.
            known = {"count": self._count, "was_stop_read": self._was_stop_read}
            status = {**known, **self._calls.read_status()}
            if self._has_ended:
                status["has_ended"] = True
            if self._is_guest and self._calls.read_signal():
                status["terminated"] = True
            self._store.set(self._key, json.dumps(status))


def beat(heartbeat: Heartbeat | None) -> None:
    """Where a launcher watches, it knows from here on whether a run is on: a process that ends in one is lost.

    With the next heartbeat it would be too late: user code may end the process a moment after a run's start or end.
    """
    if heartbeat is not None:
        heartbeat.beat()
