"""The watch under torchrun, Slurm and other engines, where no launcher of ours runs: the ranks watch each other.

Made by launch/context.py when all ranks of a run are there, closed when the run is over. A thread of every rank sends
heartbeats; rank 0's also reads them all, judges by launch/watch/deadlines.py, and posts the failure. Every rank that
reads it ends: a rank that waits in a collective cannot be woken in another way before its own limit of 30 minutes. A
rank whose store does not answer any more is cut off, or rank 0's machine is: a second thread ends it in words.
"""

import atexit
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from uneven.comm.store import Store, get_text
from uneven.errors import RankError
from uneven.hardware.roster import Roster
from uneven.launch.environment import LaunchEnvironment
from uneven.launch.external.lines import Line, LineKeeper
from uneven.launch.external.stopped import is_stopped, process_identity
from uneven.launch.heartbeat import INTERVAL_S, heartbeat_key
from uneven.launch.watch.deadlines import SILENT_S, RankHealth, check_deadlines
from uneven.train.rank_info import RankInfo

FAILED_KEY = "failed"
HEARD_KEY = "heard"
LINE_KEY = "line"
HEARD_S = 2.0  # for the others to read a failure: rank 0 may serve the store, which ends with it
JOIN_S = 2.0  # for the thread, which may be inside a call of a store that is gone


class PeerWatch:
    """Life cycle: one per group, on every rank; the thread runs from the start to `close()`.

    `store` is used by this thread alone, with keys of this group alone. `on_failed(message)` ends the process; it is
    called with what rank 0 has posted, or because the store, at `store_place`, has not answered for SILENT_S.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        roster: Roster,
        read_status: Callable[[], dict[str, Any]],
        on_failed: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        store_place: str = "rank 0",
        address: str = "",
    ) -> None:
        """`address` is where the other ranks reach this one, if anywhere: rank 0 keeps a line to each of them there."""
        self._store, self._rank, self._read_status, self._clock = store, rank, read_status, clock
        self._store_place, self._unanswered, self._limit_s = store_place, 0, SILENT_S
        self._on_failed = on_failed or self._end_process
        self._speaks = roster.local_ranks(rank)[0] == rank  # for its machine
        # All of them are there: one that is cut off before its first heartbeat is silent, not late. A cable that was
        # pulled in the first 0.2 s of a run left the others waiting for the 120 s that a process has to start.
        present = {"count": 0, "slot": 0, "phase": "setup", "deadline": read_status().get("deadline", "auto")}
        now = clock()
        self._peers = [
            RankHealth(f"{roster.host(number)}/rank-{number}", device, now, now, status=present)
            for number, device in enumerate(roster.devices)
        ]
        self._keeper, self._line, self._line_place = _keep_lines(address, rank), Line(rank), ""
        self._beside = [number for number in roster.local_ranks(rank) if number != rank]
        self._count = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="uneven-peers", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch_store, name="uneven-store", daemon=True).start()
        atexit.register(self.close)  # a thread inside a call of the store would break the interpreter's shutdown

    def close(self) -> None:
        """This rank's run is over: the others must not take its silence for a loss."""
        atexit.unregister(self.close)
        self._closed.set()
        self._thread.join(JOIN_S)

    def exchange(self) -> None:
        """Send a heartbeat, on rank 0 check everybody's, and obey a failure that was posted."""
        self._send()
        self._keep_line()
        if self._rank == 0:
            self._check()
        if message := get_text(self._store, FAILED_KEY):
            self._store.set(f"{HEARD_KEY}/{self._rank}", "1")
            with suppress(RuntimeError):  # rank 0 has ended first, and the store with it
                self._wait_until_heard()
            self._on_failed(message)
        self._unanswered = 0

    def _keep_line(self) -> None:
        if self._keeper is not None:
            if not self._line_place:
                self._line_place = self._keeper.place
                self._store.set(LINE_KEY, self._line_place)
            self._keeper.poll()  # before the heartbeats are read: who ends in peace says so before it hangs up
            for number, peer in enumerate(self._peers):
                peer.is_reached = number not in self._keeper.lost
        elif self._rank > 0:
            self._line_place = self._line_place or get_text(self._store, LINE_KEY) or ""
            if self._line_place:
                self._line.keep(self._line_place)

    def _wait_until_heard(self) -> None:
        """Rank 0 waits for all that live: they would find no store, and say 15 s later that rank 0's machine is gone.
        The others wait for those beside them, which would see a dead peer first and fail with a traceback about that.
        """
        now = self._clock()
        alive = [n for n, peer in enumerate(self._peers) if now - peer.heard_s < HEARD_S and n != 0]
        awaited = alive if self._rank == 0 else self._beside
        for _ in range(round(HEARD_S / INTERVAL_S) if awaited else 0):
            if self._store.check([f"{HEARD_KEY}/{number}" for number in awaited]) or self._closed.wait(INTERVAL_S):
                return

    def _watch_store(self) -> None:
        """Counts its own rounds, not the clock: code that holds Python's lock stops this thread and the other alike."""
        while not self._closed.wait(INTERVAL_S):
            self._unanswered += 1
            if self._is_cut_off:
                self._on_failed(
                    f"the store of {self._store_place} has not answered rank {self._rank} for {self._limit_s:.0f} s: "
                    "that machine is gone, or the network between"
                )
                return

    @property
    def _is_cut_off(self) -> bool:
        return self._unanswered * INTERVAL_S > self._limit_s

    def _run(self) -> None:
        try:
            self.exchange()
            while not self._closed.wait(INTERVAL_S):
                self.exchange()
            self._send(has_ended=True)
        except RuntimeError:  # the store is gone: the run is over and closes this, or the other thread ends it
            return
        finally:
            self._line.close()
            if self._keeper is not None:
                self._keeper.close()

    def _send(self, has_ended: bool = False) -> None:
        self._count += 1
        known = {"count": self._count, "process": process_identity(), "has_ended": has_ended}
        status = {**known, **self._read_status()}
        deadline = status.get("deadline", "auto")
        self._limit_s = math.inf if deadline is None else SILENT_S if deadline == "auto" else max(SILENT_S, deadline)
        self._store.set(heartbeat_key(self._peers[self._rank].member), json.dumps(status))

    def _check(self) -> None:
        now = self._clock()
        for peer in self._peers:
            if text := get_text(self._store, heartbeat_key(peer.member)):
                peer.update(json.loads(text), now)
            peer.is_stopped = is_stopped(peer.status.get("process", ""))
        running = [number for number, peer in enumerate(self._peers) if not peer.status.get("has_ended")]
        try:
            check_deadlines(self._peers, running, now)
        except RankError as error:
            self._store.set(FAILED_KEY, str(error))

    def _end_process(self, message: str) -> NoReturn:
        if self._speaks:
            print(f"uneven: error: {message}", file=sys.stderr, flush=True)
        os._exit(1)


def watch_peers(
    environment: LaunchEnvironment, run: int, rank_info: RankInfo, read_status: Callable[[], dict[str, Any]]
) -> PeerWatch:
    """Of a run whose group has formed; the store is served by rank 0's machine."""
    roster, store = rank_info.roster, environment.connect(f"run/{run}/watch")
    place = f"rank 0 ({roster.hosts[0]}, {environment.host}:{environment.port})"
    own = environment.address
    return PeerWatch(store, rank_info.rank, roster, read_status, store_place=place, address=own)


def _keep_lines(address: str, rank: int) -> LineKeeper | None:
    if rank > 0 or not address:
        return None
    try:
        return LineKeeper(address)
    except OSError:  # as without: a rank in code of the user's own may then be silent for ever
        return None
