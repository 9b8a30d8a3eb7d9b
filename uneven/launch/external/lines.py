"""Whether a rank is there while it cannot speak: a connection of every rank to rank 0, which the kernel keeps alive.

Code of the user's own may hold Python's lock, so that a rank in phase 'user' sends no heartbeat for as long as it
likes. Its kernel answers meanwhile. A connection that breaks means that the process has ended, or that its machine is
gone or cut off: then its silence counts like any other. Used by launch/external/peers.py, on its thread alone.
"""

import secrets
import socket
from contextlib import suppress

CONNECT_S = 1.0
# A machine that does not answer for 3 + 5 x 2 s is gone: before the 15 s of silence are over (watch/deadlines.py).
IDLE_S, INTERVAL_S, PROBES = 3, 2, 5
HELLO_BYTES = 64
MOST_STRANGERS = 64


class LineKeeper:
    """Rank 0's side. `poll` a few times a second; `lost` are the ranks whose connection has broken and is not back."""

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
    for option, value in (("TCP_KEEPIDLE", IDLE_S), ("TCP_KEEPINTVL", INTERVAL_S), ("TCP_KEEPCNT", PROBES)):
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _is_broken(sock: socket.socket) -> bool:
    """Nothing is ever said on it, so whatever can be read is its end."""
    try:
        return not sock.recv(HELLO_BYTES)
    except BlockingIOError:
        return False
    except OSError:
        return True
