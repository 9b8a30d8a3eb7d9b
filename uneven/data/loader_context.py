"""Loader processes for a rank: never forked from it.

A rank has threads (the group's, the average's, the watch's), and a fork from among them now and then never comes
back, because a lock that another thread held stays locked in the child. So loader processes come from a fork server, a
process of its own with one thread. Unlike the standard one it does not run the user's script again, guarded or not.
"""

import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import ModuleType
from typing import Any


class _Process(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802, the name is multiprocessing's
        with _without_main():
            return ForkServerProcess._Popen(process_obj)


class LoaderContext(ForkServerContext):
    """As `multiprocessing.get_context("forkserver")`, for a DataLoader."""

    Process = _Process

    def __init__(self) -> None:
        super().__init__()
        multiprocessing.set_forkserver_preload(["uneven.data.feed"])  # torch is read once, not once a process


def end_with_parent(worker: int) -> None:
    """In a loader process, at its start: a thread that ends it when the rank is gone, however that came about.

    torch's own watch looks at the parent's number, which is the server's here; and the server waits for its processes.
    """
    del worker
    rank = multiprocessing.parent_process()
    if rank is None:  # in the rank itself
        return

    def watch() -> None:
        rank.join()
        os._exit(1)

    threading.Thread(target=watch, name="uneven-parent", daemon=True).start()


@contextmanager
def _without_main() -> Iterator[None]:
    """multiprocessing looks up `__main__` to run it again in the child; an empty one leaves nothing to run."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = empty = ModuleType("__main__")
    empty.__spec__ = None
    try:
        yield
    finally:
        sys.modules["__main__"] = main
