"""The TCP connections of one Gloo group in this process, and how they are cut.

Gloo cannot be told to give up: a collective with a stopped or unplugged peer stays under way until its timeout, holds
its tensors, and when the peer goes on after all it writes its result into them. With its connections shut down it
fails at once, here and at the peers. Gloo tells nobody which sockets are its own, so they are found by address: a
group's device listens at an address of its own, and each of its connections has such an address at one end.

Linux alone (/proc). Elsewhere, or where the address cannot be told, nothing is cut, and the timeout ends it.
"""

import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from uneven.comm.store import Forming, Store

SILENCE_S = 30  # in which a way between two machines must carry something
_LISTENS = "0A"
_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))

T = TypeVar("T")


class Connections:
    """Those of a group, and of the groups made from it."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._own: list[str] = []  # addresses, as the kernel writes them
        self._peers: list[str] = []

    def add(self, store: Store, own: Sequence[str], forming: Forming) -> None:
        """One more group, whose keys `store` has alone, listens at these addresses. On all ranks at once."""
        keys = [f"here/{rank}" for rank in range(self._size)]
        store.set(keys[self._rank], json.dumps(own))
        forming.wait(store, keys)
        self._own += own
        for other, key in enumerate(keys):
            if other != self._rank:
                self._peers += json.loads(store.get(key))

    def limit_silence(self) -> None:
        """Let the kernel end a connection on which a peer's machine acknowledges nothing for `SILENCE_S`.

        Where packets between two machines are dropped that both reach the leader, no heartbeat is missing, all ranks
        wait for others, and TCP by itself tries again for a quarter of an hour. A stopped process is none of this: its
        kernel answers.
        """
        for copy in self._sockets():
            with suppress(OSError):  # a system that lacks one of them
                copy.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 3)
                copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_S // 3)
                copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENCE_S)

    def cut(self) -> None:
        """Shut down all of them."""
        for copy in self._sockets():
            with suppress(OSError):  # the peer has closed it
                copy.shutdown(socket.SHUT_RDWR)

    def _sockets(self) -> Iterator[socket.socket]:
        """What came in at this rank's addresses or goes out to the peers'; each is valid until the next."""
        own, peers = set(self._own), set(self._peers)
        wanted = {inode for local, to, state, inode in _rows() if state != _LISTENS and (local in own or to in peers)}
        for fd, inode in _sockets() if wanted else ():
            if inode in wanted:
                # A copy, which stays the same socket if Gloo closes its own meanwhile.
                with suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
                    if os.fstat(copy.fileno()).st_ino == inode:
                        yield copy


def listening_since(make: Callable[[], T], count: int) -> tuple[T, list[str]]:
    """What `make` returns, and the `count` addresses that this process listens at since.

    None of them where there are more or less: another thread has begun to listen meanwhile.
    """
    before = _listening()
    made = make()
    new = sorted(_listening() - before)
    return made, new if len(new) == count else []


def _listening() -> set[str]:
    own = {inode for _, inode in _sockets()}
    return {local for local, _, state, inode in _rows() if state == _LISTENS and inode in own}


def _rows() -> Iterator[tuple[str, str, str, int]]:
    """Local and remote address, state and inode of all TCP sockets in this network namespace."""
    for table in _TABLES:
        with suppress(OSError):
            for line in table.read_text().splitlines()[1:]:
                fields = line.split()
                yield fields[1], fields[2], fields[3], int(fields[9])


def _sockets() -> Iterator[tuple[int, int]]:
    """Descriptor and inode of this process's sockets."""
    with suppress(OSError):
        for fd in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                link = os.readlink(f"/proc/self/fd/{fd}")
                if link.startswith("socket:["):
                    yield int(fd), int(link[8:-1])
