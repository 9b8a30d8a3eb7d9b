"""The multiprocessing contexts of DataLoaders; a rank's loader processes are never forked from the rank itself.

A rank has threads (process group, averaging, heartbeat). A fork while one of them holds a lock leaves that lock held
forever in the child, and the child hangs. So loader processes come from a fork server, a separate process with a
single thread. Unlike the standard fork server it never runs the user's script again, even without a `__main__` guard
(test_loader_processes_of_a_rank_do_not_run_the_script_again).
"""

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing.context import ForkContext, ForkProcess, ForkServerContext, ForkServerProcess
from types import ModuleType
from typing import Any

READING_S = 5.0  # for a loader process that is inside a function of the user's, before it is killed
AGAIN_S = 0.1
QUIET_TRACKER = "ignore:resource_tracker:UserWarning"  # it removes what a killed rank has left, and would say so


class _LoaderProcess(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802, the name is multiprocessing's
        with _hidden_main(), _sigterm_blocked():
            return ForkServerProcess._Popen(process_obj)


class LoaderContext(ForkServerContext):
    """Like `multiprocessing.get_context("forkserver")`, but hides `__main__`; pass it to a DataLoader."""

    Process = _LoaderProcess

    def __init__(self) -> None:
        super().__init__()
        multiprocessing.set_forkserver_preload(["uneven.data.feed"])  # import torch once, in the server
        if QUIET_TRACKER not in sys.warnoptions:  # which it is started with
            sys.warnoptions.append(QUIET_TRACKER)


class _ForkedProcess(ForkProcess):
    """A loader process of a run in the caller's own process; it has a class of its own to be known by."""


class ForkedContext(ForkContext):
    """For a process that is no rank: a forked process shares the data set's memory and needs no pickling."""

    Process = _ForkedProcess


def end_with_parent(worker: int) -> None:
    """A DataLoader worker_init_fn: start a thread that ends this loader process when its rank has ended in any way.

    torch's own watchdog compares the parent's pid, which is the fork server's here, and the server does not exit before
    its children (test_loader_processes_end_with_their_rank_even_if_it_is_killed).
    """
    del worker
    rank = multiprocessing.parent_process()
    if rank is None:  # called in the rank itself
        return

    def watch() -> None:
        rank.join()
        os._exit(1)

    threading.Thread(target=watch, name="uneven-parent", daemon=True).start()


def outlive_sigterm() -> None:
    """In a loader process: a first SIGTERM is not for it, and only a second one ends it.

    A scheduler sends SIGTERM to every process of a job. The run then saves, and for its last step it needs its batches;
    torch would report a loader process that was killed as an error. DataLoader itself terminates loader processes only
    as a last resort, and multiprocessing once more.
    """
    if multiprocessing.parent_process() is None:  # called in the rank itself
        return

    def end(*_: object) -> None:
        os._exit(0)  # killed by the signal, it would make torch raise in the rank, at its exit

    signal.signal(signal.SIGTERM, lambda number, _: signal.signal(number, end))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


@cache
def end_loaders_at_exit() -> None:
    """Let this process end although loader processes are still there, as after an exception or a `break`.

    At its exit multiprocessing sends them one SIGTERM and waits for them, and one is not enough: see `outlive_sigterm`.
    What is registered runs before that, and after a loop's own end, which may still read: it is made later.
    """
    atexit.register(_end_loaders)


def _end_loaders() -> None:
    loaders = [one for one in multiprocessing.active_children() if isinstance(one, _LoaderProcess | _ForkedProcess)]
    end_s = time.monotonic() + READING_S
    while loaders and time.monotonic() < end_s:
        for process in loaders:
            process.terminate()
        loaders[0].join(AGAIN_S)  # two signals at once would be one: a process learns of the second after the first
        loaders = [process for process in loaders if process.is_alive()]
    for process in loaders:
        process.kill()


@contextmanager
def _sigterm_blocked() -> Iterator[None]:
    """A fork server that is started inside never gets a SIGTERM: without it its loader processes count as dead."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _hidden_main() -> Iterator[None]:
    """Replace `__main__` by an empty module, because multiprocessing would run its file again in the child."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = empty = ModuleType("__main__")
    empty.__spec__ = None
    try:
        yield
    finally:
        sys.modules["__main__"] = main
