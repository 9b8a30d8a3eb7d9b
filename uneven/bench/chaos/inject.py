"""What can happen to a rank process: it is killed, stopped for good or for a while, or loses its connections.

The one injector of faults: `uneven chaos` uses it, and the tests and tools that disturb runs. Invariant: a fault is
done only to a process that the caller found among its descendants, and that is still the same one; no torch here.

A process is cut off as when the switch between two machines loses power and the cable's ends notice: whatever it or its
peers wait for on a TCP connection fails. Linux alone: a parent may take copies of its children's sockets (pidfd_getfd),
and shutting a copy down shuts the connection down.
"""

import ctypes
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from uneven.errors import MachineError

KINDS = ("kill", "stop", "pause", "cut")
RANK = "uneven.launch.rank"
_PIDFD_GETFD = 438  # its number on all architectures


def rank_processes(launcher: int, *, recursive: bool = False) -> dict[int, tuple[psutil.Process, Path]]:
    """The rank processes that a launcher has started, by their numbers, each with the private folder of the run.

    `recursive` finds those of launchers that this one has started, too.
    """
    found = {}
    with suppress(psutil.Error):
        parent = psutil.Process(launcher)
        for process in [parent, *parent.children(recursive=recursive)]:
            with suppress(psutil.Error, ValueError, IndexError):
                words = process.cmdline()
                if RANK in words and is_alive(process):
                    place = words.index(RANK)
                    found[int(words[place + 2])] = process, Path(words[place + 1])
    return found


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs; a stopped one counts, too."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def send(process: psutil.Process, number: int) -> bool:
    """Whether the signal was sent: not to a process that has ended."""
    if not is_alive(process):
        return False
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return False
    return True


class Injector:
    """Does faults, and wakes processes that were only paused: the caller calls `wake` again and again."""

    def __init__(self) -> None:
        self._paused: dict[psutil.Process, float] = {}  # until when

    def do(self, kind: str, process: psutil.Process, pause_s: float = 0.0) -> bool:
        """Whether it was done: not to a process that has ended, or has no connections to lose."""
        if kind == "cut":
            return is_alive(process) and cut(process.pid) > 0
        if not send(process, signal.SIGKILL if kind == "kill" else signal.SIGSTOP):
            return False
        if kind == "pause":
            self._paused[process] = time.monotonic() + pause_s
        return True

    def is_paused(self, process: psutil.Process) -> bool:
        return process in self._paused

    def wake(self, all_of_them: bool = False) -> list[psutil.Process]:
        """Those that go on, since their time is over."""
        now = math.inf if all_of_them else time.monotonic()
        over = [process for process, end in self._paused.items() if end <= now]
        for process in over:
            del self._paused[process]
        return [process for process in over if send(process, signal.SIGCONT)]


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
