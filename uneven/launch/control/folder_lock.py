"""The folder of a live run is its own: another one would move its files aside, or write checkpoints of the same names.

Rank 0's process, or the launcher of its ranks, holds a lock on the folder's mark (`.uneven`) from the last check before
the run to its end; the system releases it with the process, however that dies. Where the file system has no locks, or
the mark cannot be opened, runs go on without.
"""

import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from uneven.errors import InputError
from uneven.files import MARK, read_json

T = TypeVar("T")
_held: dict[Path, "HeldFolder"] = {}  # of this process
_guard = threading.Lock()


class HeldFolder:
    """A run's folder while it is held; `release` more than once is no error."""

    def __init__(self, handle: int) -> None:
        self._handle: int | None = handle

    def release(self) -> None:
        with _guard:
            handle, self._handle = self._handle, None
        if handle is not None:
            _unlock(handle)


def hold_folder(folder: Path, make: Callable[[], T]) -> tuple[T, HeldFolder | None]:
    """Make a run's folder, or go on in it, by `make`, and hold it; InputError where another live run writes there.

    A loop of this very process that was left without its end, as in a notebook, gives the folder up.
    """
    path = folder.resolve()
    with _guard:
        before = _held.pop(path, None)
    if before is not None:
        before.release()
    earlier = _lock(folder)  # held while its files are moved, and the mark becomes another file
    try:
        made = make()
        handle = _lock(folder)
    finally:
        if earlier is not None:
            _unlock(earlier)
    if handle is None:
        return made, None
    held = HeldFolder(handle)
    with _guard:
        _held[path] = held
    return made, held


def _lock(folder: Path) -> int | None:
    try:
        handle = os.open(folder / MARK, os.O_RDWR)
    except OSError:
        return None  # no run has been there, or this one may not write there and is told so elsewhere
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        mark = read_json(folder / MARK)
        pid = f" (pid {mark['pid']})" if isinstance(mark, dict) and "pid" in mark else ""
        raise InputError(
            f"out={str(folder)!r}: a run{pid} is writing there; wait for its end, stop it (uneven stop), or choose "
            "another folder"
        ) from error
    except OSError:
        os.close(handle)
        return None
    return handle


def _unlock(handle: int) -> None:
    # Not by closing alone: a process that was forked meanwhile, as a DataLoader's, has the handle, too.
    try:
        fcntl.flock(handle, fcntl.LOCK_UN)
    finally:
        os.close(handle)
