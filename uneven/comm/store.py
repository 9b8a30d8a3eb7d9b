"""The rendezvous store. It runs in the launcher, not in a rank, so that it outlives a rank that dies.

Each rank and thread has a client of its own: a client that waits blocks its other users. The store has no
authentication, so it listens on one address alone: given only a host name TCPStore listens on every interface,
127.0.0.1 or not (seen in /proc/net/tcp6 with torch 2.13), so it gets a socket that is already bound.
"""

import socket
from datetime import timedelta

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # exported, but not by name
from torch.distributed import Store as Store  # type: ignore[attr-defined]
from torch.distributed import TCPStore as TCPStore  # type: ignore[attr-defined]

CONNECT_TIMEOUT = timedelta(seconds=60)


def open_store(listener: socket.socket | None = None) -> tuple[TCPStore, int]:
    """A new store in this process, on a free port of the loopback interface or where `listener` is bound already;
    returns its port too.
    """
    if listener is None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    address, port = str(listener.getsockname()[0]), int(listener.getsockname()[1])
    fd = listener.detach()  # from here on the store closes it
    store = TCPStore(
        *(address, port),
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
