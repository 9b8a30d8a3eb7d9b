"""Gloo in this process: where it listens, what it prints, and how its TCP connections are cut.

Used by comm/torch_group.py wherever a group is formed.

- Address: Gloo takes the first address of GLOO_SOCKET_IFNAME's interface, and IPv4 comes first: beside a machine that
  has IPv6 alone it fails (`ss_family 10 vs 2`). Then launch/external/interface.py names the address here.
- Output: older releases of torch write a line to stdout for every group that is connected (2.8; 2.13 writes none). It
  would be in the middle of what a script prints and break every `--json`, so it goes to stderr.
- Connections: Gloo cannot be told to give up. A collective with a stopped or unplugged peer stays under way until its
  timeout, holds its tensors, and when the peer goes on after all it writes its result into them. With its connections
  shut down it fails at once, here and at the peers. Gloo tells nobody which sockets are its own, so they are found by
  address: a group's device listens at an address of its own, and each of its connections has such an address at one
  end. Linux alone (/proc). Elsewhere, or where the address cannot be told, nothing is cut, and the timeout ends it.
"""

import ctypes
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from uneven.comm.store import Forming, Store

BACKEND = "gloo_at_address"  # in torch's list of backends
WRITES: bool = TorchVersion(torch.__version__) < "2.13"  # to stdout
SILENCE_S = 30  # in which a way between two machines must carry something

_LISTENS = "0A"
_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))

T = TypeVar("T")

_address: list[str] = []
_lock = threading.Lock()
_inside = 0  # threads that form a group
_stdout = -1  # what the descriptor 1 was


def use_gloo_address(address: str) -> None:
    """All groups that this process forms from now on have their Gloo connections at this numeric address."""
    _address[:] = [address]
    if BACKEND.upper() not in dist.Backend.__dict__:
        dist.Backend.register_backend(BACKEND, _make_backend, extended_api=True, devices=["cpu"])


def gloo_backend() -> str:
    """The name of the backend for host tensors."""
    return BACKEND if _address else "gloo"


def make_gloo(store: Store, rank: int, size: int, options: Any) -> Any:
    """A process group of Gloo that torch does not list; waits for its peers."""
    gloo: Any = dist.ProcessGroupGloo
    return gloo(store, rank, size, options)


def make_options(timeout: timedelta) -> Any:
    """For `make_gloo`, at the same address as torch's default group."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()  # Gloo's options have no public name that holds its devices
    if _address:
        options._devices = [gloo.create_device(hostname=_address[0])]
    elif names := os.environ.get("GLOO_SOCKET_IFNAME"):
        options._devices = [gloo.create_device(interface=name) for name in names.split(",")]
    else:
        options._devices = [gloo.create_default_device()]
    options._threads = 2 * len(options._devices)
    options._timeout = timeout
    return options


def _make_backend(wanted: Any, options: Any) -> Any:
    del options
    return make_gloo(wanted.store, wanted.group_rank, wanted.group_size, make_options(wanted.timeout))


@contextmanager
def gloo_to_stderr() -> Iterator[None]:
    """Around the forming of a group: the descriptor is the process's, so the last of several threads puts it back."""
    if not WRITES or not _enter():
        yield
        return
    try:
        yield
    finally:
        _leave()


def _enter() -> bool:
    global _inside, _stdout
    with _lock:
        if _inside == 0:
            try:
                os.fstat(2)
                _stdout = os.dup(1)
            except OSError:  # a process without stdout, or without stderr
                return False
            os.dup2(2, 1)
        _inside += 1
        return True


def _leave() -> None:
    global _inside
    with _lock:
        _inside -= 1
        if _inside == 0:
            ctypes.CDLL(None).fflush(None)  # what C++ still holds back
            os.dup2(_stdout, 1)
            os.close(_stdout)


class Connections:
    """The TCP connections of a group, and of the groups made from it."""

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
        for fd, inode in _own_sockets() if wanted else ():
            if inode in wanted:
                # A copy, which stays the same socket if Gloo closes its own meanwhile.
                with suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
                    if os.fstat(copy.fileno()).st_ino == inode:
                        yield copy


def listening_since(make: Callable[[], T]) -> tuple[T, list[str]]:
    """What `make` returns, and the addresses that this process listens at since, one for each of Gloo's devices.

    None of them where there are more or fewer: another thread has begun to listen meanwhile.
    """
    before = _listening()
    made = make()
    new = sorted(_listening() - before)
    devices = 1 if _address else len(os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
    return made, new if len(new) == devices else []


def _listening() -> set[str]:
    own = {inode for _, inode in _own_sockets()}
    return {local for local, _, state, inode in _rows() if state == _LISTENS and inode in own}


def _rows() -> Iterator[tuple[str, str, str, int]]:
    """Local and remote address, state and inode of all TCP sockets in this network namespace."""
    for table in _TABLES:
        with suppress(OSError):
            for line in table.read_text().splitlines()[1:]:
                fields = line.split()
                yield fields[1], fields[2], fields[3], int(fields[9])


def _own_sockets() -> Iterator[tuple[int, int]]:
    """Descriptor and inode of this process's sockets."""
    with suppress(OSError):
        for fd in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                link = os.readlink(f"/proc/self/fd/{fd}")
                if link.startswith("socket:["):
                    yield int(fd), int(link[8:-1])
