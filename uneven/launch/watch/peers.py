"""The watch under torchrun, Slurm, Ray and others, where no launcher of ours runs: the ranks watch each other.

Made by launch/context.py when all ranks of a run are there, closed when the run is over. A thread of every rank sends
heartbeats; rank 0's also reads them all, judges by lost.py, and posts the failure. Every rank that reads it ends: a
rank that waits in a collective cannot be woken in another way before its own limit of 30 minutes. A rank whose store
does not answer any more is cut off, or rank 0's machine is: a second thread ends it in words.

Code of the user's own may hold Python's lock, so that a rank in phase 'user' sends no heartbeat. Nobody knows more of
its process than that, so its silence counts after ten minutes: it may be stopped, or its machine be gone.
"""

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from uneven.comm.store import Store, get_text
from uneven.hardware.roster import Roster
from uneven.launch.environment import LaunchEnvironment
from uneven.launch.heartbeat import INTERVAL_S, heartbeat_key
from uneven.launch.watch.lost import SILENT_S, RankHealth, Signs, judge, silence_allowed_s
from uneven.train.rank_info import RankInfo

FAILED_KEY = "failed"
HEARD_KEY = "heard"
HEARD_S = 2.0  # for the others to read a failure: rank 0 may serve the store, which ends with it
JOIN_S = 2.0  # for the thread, which may be inside a call of a store that is gone
USER_S = 600.0  # in code of the user's own


class PeerWatch:
    """Life cycle: one per group, on every rank; the thread runs from the start to `close()`.

    `store` is used by this thread alone, with keys of this group alone. `on_failed(message)` ends the process; it is
    called with what rank 0 has posted, or because the store has not answered for SILENT_S.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        roster: Roster,
        read_status: Callable[[], dict[str, Any]],
        on_failed: Callable[[str], None] | None = None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._roster = roster
        self._read_status = read_status
        self._on_failed = on_failed or self._end_process
        self._unanswered = 0  # looks at the store
        self._limit_s = SILENT_S
        # All of them are there: one that is cut off before its first heartbeat is silent, not late. A cable that was
        # pulled in the first 0.2 s of a run left the others waiting for the 120 s that a process has to start.
        present = {"count": 0, "slot": 0, "phase": "setup", "deadline": read_status().get("deadline", "auto")}
        now = time.monotonic()
        self._peers = [
            RankHealth(f"{roster.host(number)}/rank-{number}", device, now, now, status=present)
            for number, device in enumerate(roster.devices)
        ]
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
        if self._rank == 0:
            self._check()
        if message := get_text(self._store, FAILED_KEY):
            self._store.set(f"{HEARD_KEY}/{self._rank}", "1")
            with suppress(RuntimeError):  # rank 0 has ended first, and the store with it
                self._wait_until_heard()
            self._on_failed(message)
        self._unanswered = 0

    def _wait_until_heard(self) -> None:
        """Rank 0 waits for all that live: they would find no store, and say 15 s later that rank 0's machine is gone.
        The others wait for those beside them, which would see a dead peer first and fail with a traceback about that.
        """
        now = time.monotonic()
        awaited = [number for number in self._roster.local_ranks(self._rank) if number != self._rank]
        if self._rank == 0:
            awaited = [n for n, peer in enumerate(self._peers) if now - peer.heard_s < HEARD_S and n != 0]
        for _ in range(round(HEARD_S / INTERVAL_S) if awaited else 0):
            if self._store.check([f"{HEARD_KEY}/{number}" for number in awaited]) or self._closed.wait(INTERVAL_S):
                return

    def _watch_store(self) -> None:
        """Counts its own rounds, not the clock: code that holds Python's lock stops this thread and the other alike."""
        while not self._closed.wait(INTERVAL_S):
            self._unanswered += 1
            if self._is_cut_off:
                self._on_failed(
                    f"the store of rank 0 ({self._roster.hosts[0]}) has not answered rank {self._rank} for "
                    f"{self._limit_s:.0f} s: that machine is gone, or the network between"
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

    def _send(self, has_ended: bool = False) -> None:
        self._count += 1
        status = {"count": self._count, "has_ended": has_ended, **self._read_status()}
        self._limit_s = silence_allowed_s(status.get("deadline", "auto"))
        self._store.set(heartbeat_key(self._peers[self._rank].member), json.dumps(status))

    def _check(self) -> None:
        now = time.monotonic()
        for peer in self._peers:
            if text := get_text(self._store, heartbeat_key(peer.member)):
                peer.update(json.loads(text), now)
        signs = Signs(
            codes=[0 if peer.status.get("has_ended") else None for peer in self._peers],
            stopped={n for n, peer in enumerate(self._peers) if now - peer.heard_s > USER_S},
        )
        for number, (what, advice) in judge(self._peers, signs, now).hanging.items():
            self._store.set(FAILED_KEY, f"{self._peers[number].name(number)} {what}{advice}")
            return

    def _end_process(self, message: str) -> NoReturn:
        if self._roster.local_ranks(self._rank)[0] == self._rank:  # it speaks for its machine
            print(f"uneven: error: {message}", file=sys.stderr, flush=True)
        os._exit(1)


def watch_peers(
    environment: LaunchEnvironment, run: int, rank_info: RankInfo, read_status: Callable[[], dict[str, Any]]
) -> PeerWatch:
    """Of a run whose group has formed; the store is served by rank 0's machine."""
    store = environment.connect(f"run/{run}/watch")
    return PeerWatch(store, rank_info.rank, rank_info.roster, read_status)
