"""The rendezvous store, and how ranks wait in it while they form a group.

The store runs in the launcher, not in a rank, so that it outlives a rank that dies. Each rank and thread has a client
of its own: a client that waits blocks its other users. The store has no authentication, so it listens on one address
alone: given only a host name TCPStore listens on every interface, 127.0.0.1 or not (seen in /proc/net/tcp6 with torch
2.13), so it gets a socket that is already bound.
"""

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # exported, but not by name
from torch.distributed import Store as Store  # type: ignore[attr-defined]
from torch.distributed import TCPStore as TCPStore  # type: ignore[attr-defined]

from uneven.comm.lost import Lost
from uneven.errors import GroupLostError

CONNECT_TIMEOUT = timedelta(seconds=60)
# The last resort. A run's first group may wait so long: a rank may still load data or compile, and the launcher ends
# the run if one dies. A collective, too: a dead peer raises at once, and the launcher finds a rank that hangs.
GROUP_TIMEOUT = timedelta(minutes=30)
# Of a later generation's group: its ranks are there and wait for nothing else, which launch/membership.py sees to.
REFORM_TIMEOUT = timedelta(seconds=20)
PAUSE_S = 0.02


def open_store(listener: socket.socket | None = None) -> tuple[TCPStore, int]:
    """A new store in this process, on a free port of the loopback interface or where `listener` is bound already;
    returns its port too.
    """
    if listener is None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    address, port = str(listener.getsockname()[0]), int(listener.getsockname()[1])
    fd = listener.detach()  # from here on the store closes it
    store = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=CONNECT_TIMEOUT,
        use_libuv=True,
        master_listen_fd=fd,
    )
    return store, port


def reach_store(host: str, port: int) -> TCPStore:
    """A client of the launcher's store."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=CONNECT_TIMEOUT, use_libuv=True)


def under(prefix: str, store: Store) -> Store:
    """The same store with all keys under a prefix."""
    return PrefixStore(prefix, store) if prefix else store


class ClaimCounter:
    """Numbers from 0 on that ranks claim, each number once. Connects at the first claim.

    By a connection of its own: a client that waits blocks its other users, and claims may be made by another thread
    than the one that runs collectives.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._own: Store | None = None

    def claim(self, count: int) -> int:
        """Claim the next `count` numbers; returns the first."""
        if self._own is None:
            self._own = self._store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
        return int(self._own.add("claims", count)) - count


def get_text(store: Store, key: str) -> str | None:
    """A key's text, or None while it is not set; does not wait."""
    return store.get(key).decode() if store.check([key]) else None


@dataclass(frozen=True)
class Forming:
    """How a rank waits for the others of a group that forms: at most `limit`, and only while the group is wanted.

    `is_stale`: whether a newer group is wanted by now; asked by the thread that waits, some 50 times a second.
    """

    limit: timedelta = GROUP_TIMEOUT
    is_stale: Callable[[], bool] = bool  # never

    def unless(self, lost: Lost) -> "Forming":
        """The same for one more group of those that `lost` is about."""
        return Forming(self.limit, lambda: lost.error is not None or self.is_stale())

    def wait(self, store: Store, keys: Sequence[str]) -> None:
        """Until all keys are set. GroupLostError where that takes too long, or another group is wanted."""
        self.poll(lambda: bool(store.check(list(keys))))

    def poll(self, is_done: Callable[[], bool]) -> None:
        """Until `is_done()`. GroupLostError as in `wait`."""
        end = time.monotonic() + self.limit.total_seconds()
        pause = 0.001
        while not is_done():
            # A wait of the store's own in slices would write a warning about each.
            if self.is_stale():
                raise GroupLostError("the group was given up while it was formed: a newer generation was announced")
            if time.monotonic() > end:
                raise GroupLostError(
                    f"a peer did not come within {self.limit.total_seconds():g} s: the group was not formed"
                )
            time.sleep(pause)
            pause = min(2 * pause, PAUSE_S)
