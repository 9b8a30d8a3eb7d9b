"""Cut the network connections of a process of one's own, from outside: `uneven chaos --cut`.

As when the switch between two machines loses power and the cable's ends notice: whatever the process or its peers wait
for on a TCP connection fails. Linux alone: a parent may take copies of its children's sockets (pidfd_getfd), and
shutting a copy down shuts the connection down.
"""

import ctypes
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from uneven.errors import MachineError

_PIDFD_GETFD = 438  # its number on all architectures


def check_cut() -> None:
    """MachineError where this machine cannot, tried on this very process."""
    if not sys.platform.startswith("linux") or not hasattr(os, "pidfd_open"):
        raise MachineError("--cut needs Linux: it shuts down the sockets of rank processes from outside")
    with socket.socket() as own:
        try:
            os.close(_copy(os.getpid(), own.fileno()))
        except OSError as error:
            raise MachineError(
                f"--cut is not allowed here ({error.strerror}): it takes copies of sockets of rank processes, which "
                "needs Linux 5.6 and, in a container, the capability SYS_PTRACE"
            ) from error


def cut(pid: int) -> int:
    """Shut down all TCP connections of this process, a descendant of this one; how many there were."""
    found = 0
    for fd in _socket_fds(pid):
        with suppress(OSError), socket.socket(fileno=_copy(pid, fd)) as copy:
            is_tcp = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM
            if is_tcp and not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                copy.shutdown(socket.SHUT_RDWR)
                found += 1
    return found


def _copy(pid: int, fd: int) -> int:
    """A descriptor of this process for what `fd` is in that one."""
    process = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        copy = int(libc.syscall(_PIDFD_GETFD, process, fd, 0))
        if copy < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return copy
    finally:
        os.close(process)


def _socket_fds(pid: int) -> Iterator[int]:
    folder = Path(f"/proc/{pid}/fd")
    with suppress(OSError):
        for entry in list(folder.iterdir()):
            with suppress(OSError):
                if os.readlink(entry).startswith("socket:["):
                    yield int(entry.name)
