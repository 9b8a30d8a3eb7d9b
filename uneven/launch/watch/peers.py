"""The watch under torchrun, Slurm, Ray and others, where no launcher of ours runs: the ranks watch each other.

Made by launch/context.py when all ranks of a run are there, closed when the run is over. A thread of every rank sends
heartbeats; rank 0's also reads them all, judges by lost.py, and posts the failure. Every rank that reads it ends: a
rank that waits in a collective cannot be woken in another way before its own limit of 30 minutes. A rank whose store
does not answer any more is cut off, or rank 0's machine is: a second thread ends it in words.

[Note: kept lines] Code of the user's own may hold Python's lock, so that a rank in phase 'user' sends no heartbeat for
as long as it likes. Its kernel answers meanwhile: every rank has a connection to rank 0 that the kernels keep alive.
One that breaks means that the process has ended, or that its machine is gone or cut off, and its silence counts like
any other. Where the process is on rank 0's machine, rank 0 also asks the kernel whether a signal has stopped it.
"""

import atexit
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from uneven.comm.store import Store, get_text
from uneven.hardware.optional import read_text
from uneven.hardware.roster import Roster
from uneven.launch.cleanup import pid_namespace, process_start, process_state
from uneven.launch.environment import LaunchEnvironment
from uneven.launch.heartbeat import INTERVAL_S, heartbeat_key
from uneven.launch.watch.lost import SILENT_S, RankHealth, Signs, judge, silence_allowed_s
from uneven.train.rank_info import RankInfo

FAILED_KEY = "failed"
HEARD_KEY = "heard"
LINE_KEY = "line"
HEARD_S = 2.0  # for the others to read a failure: rank 0 may serve the store, which ends with it
JOIN_S = 2.0  # for the thread, which may be inside a call of a store that is gone
CONNECT_S = 1.0
HELLO_BYTES = 64
MOST_STRANGERS = 64
# A machine that does not answer for 3 + 5 x 2 s is gone: before the 15 s of silence are over.
KEEP_ALIVE = (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 5))
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class PeerWatch:
    """Life cycle: one per group, on every rank; the thread runs from the start to `close()`.

    `store` is used by this thread alone, with keys of this group alone. `on_failed(message)` ends the process; it is
    called with what rank 0 has posted, or because the store has not answered for SILENT_S. `keeper`: rank 0's side of
    the [Note: kept lines].
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        roster: Roster,
        read_status: Callable[[], dict[str, Any]],
        on_failed: Callable[[str], None] | None = None,
        keeper: "LineKeeper | None" = None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._roster = roster
        self._read_status = read_status
        self._keeper = keeper
        self._on_failed = on_failed or self._end_process
        self._line = Line(rank)
        self._line_place = ""
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
        elif self._rank > 0:
            self._line_place = self._line_place or get_text(self._store, LINE_KEY) or ""
            if self._line_place:
                self._line.keep(self._line_place)

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
        finally:
            self._line.close()
            if self._keeper is not None:
                self._keeper.close()

    def _send(self, has_ended: bool = False) -> None:
        self._count += 1
        known = {"count": self._count, "process": process_identity(), "has_ended": has_ended}
        status = {**known, **self._read_status()}
        self._limit_s = silence_allowed_s(status.get("deadline", "auto"))
        self._store.set(heartbeat_key(self._peers[self._rank].member), json.dumps(status))

    def _check(self) -> None:
        now = time.monotonic()
        for peer in self._peers:
            if text := get_text(self._store, heartbeat_key(peer.member)):
                peer.update(json.loads(text), now)
        signs = Signs(
            codes=[0 if peer.status.get("has_ended") else None for peer in self._peers],
            stopped={n for n, peer in enumerate(self._peers) if is_stopped(peer.status.get("process", ""))},
            unreached=self._keeper.lost if self._keeper is not None else (),
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
    keeper = None
    if rank_info.rank == 0 and environment.address:
        with suppress(OSError):  # without it a rank in code of the user's own may be silent for ever
            keeper = LineKeeper(environment.address)
    store = environment.connect(f"run/{run}/watch")
    return PeerWatch(store, rank_info.rank, rank_info.roster, read_status, keeper=keeper)


class LineKeeper:
    """Rank 0's side of the [Note: kept lines]. `poll` often; `lost` are the ranks whose line has broken."""

    def __init__(self, address: str) -> None:
        """OSError where nothing can listen at this address."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family, backlog=1024)
        self._server.setblocking(False)
        self._word = secrets.token_hex(8)
        self.place = f"{address} {self._server.getsockname()[1]} {self._word}"
        self.lost: set[int] = set()
        self._strangers: list[socket.socket] = []
        self._lines: dict[int, socket.socket] = {}

    def poll(self) -> None:
        with suppress(OSError):  # nobody is waiting
            while True:
                sock, _ = self._server.accept()
                _keep_alive(sock)
                self._strangers.append(sock)
        for sock in self._strangers[:-MOST_STRANGERS]:
            sock.close()
        self._strangers = [sock for sock in self._strangers[-MOST_STRANGERS:] if not self._is_greeted(sock)]
        for rank, sock in list(self._lines.items()):
            if _is_broken(sock):
                self.lost.add(rank)
                self._lines.pop(rank).close()

    def close(self) -> None:
        for sock in (self._server, *self._strangers, *self._lines.values()):
            sock.close()

    def _is_greeted(self, sock: socket.socket) -> bool:
        """Whether it need not be asked again: it has said who it is, or has gone."""
        try:
            word, _, rank = sock.recv(HELLO_BYTES).decode(errors="replace").strip().partition(" ")
        except BlockingIOError:
            return False
        except OSError:
            word, rank = "", ""
        if word != self._word or not rank.isdecimal():
            sock.close()
            return True
        if (before := self._lines.pop(int(rank), None)) is not None:
            before.close()
        self._lines[int(rank)] = sock
        self.lost.discard(int(rank))
        return True


class Line:
    """The other ranks' side: `keep` a few times a second, for it connects again where the line has broken."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._sock: socket.socket | None = None

    def keep(self, place: str) -> None:
        if self._sock is not None and not _is_broken(self._sock):
            return
        self.close()
        address, port, word = place.split(" ")
        with suppress(OSError):  # tried again the next time; until then rank 0 knows no more than the heartbeats tell
            self._sock = socket.create_connection((address, int(port)), CONNECT_S)
            _keep_alive(self._sock)
            self._sock.send(f"{word} {self._rank}\n".encode())

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def _keep_alive(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEP_ALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _is_broken(sock: socket.socket) -> bool:
    """Nothing is ever said on it, so whatever can be read is its end."""
    try:
        return not sock.recv(HELLO_BYTES)
    except BlockingIOError:
        return False
    except OSError:
        return True


def process_identity() -> str:
    """This process, for others of the machine: its pid, and what makes it a name for ever."""
    return f"{_machine()} {os.getpid()} {_start_of(os.getpid())}"


def is_stopped(identity: str) -> bool:
    """Of a process on another machine, or in another container, nothing is known."""
    machine, _, process = identity.partition(" ")
    pid, _, start = process.partition(" ")
    if machine != _machine() or not pid.isdecimal() or process_start(int(pid)) != start:
        return False
    return process_state(int(pid)) == "T"


@cache
def _machine() -> str:
    """Equal for processes that have the same pids."""
    return f"{(read_text(BOOT_ID) or '').strip()}/{pid_namespace()}"


@cache
def _start_of(pid: int) -> str | None:
    return process_start(pid)
