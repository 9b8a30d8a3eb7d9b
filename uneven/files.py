"""Atomic file writes, the folder of a run's results, and why a write failed in plain words.

Called wherever results are written. Invariant: a file under its final name is complete, also after a crash.
"""

import errno
import os
import tempfile
from pathlib import Path

from uneven.errors import MachineError


def write_atomically(path: Path, content: bytes, work: Path | None = None) -> None:
    """Replace a file's content: afterwards it holds all of the new one, or, after a failure, still the old one.

    The unfinished file is in `work` (default: the same folder), which must be on the same file system.
    """
    handle, temporary = tempfile.mkstemp(dir=work or path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes it private; results are meant to be read
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    # The rename itself is only durable once the folder is synced: a power cut could otherwise lose the new name.
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_out_folder(path: Path) -> None:
    """Make an empty folder for a run's results; an older run there is renamed to NAME.1, NAME.2, ...

    Writes a file at once: a folder that cannot be written to must fail before training, not after it.
    """
    try:
        if path.is_dir() and any(path.iterdir()):
            number = 1
            while (aside := path.with_name(f"{path.name}.{number}")).exists():
                number += 1
            path.rename(aside)
        path.mkdir(parents=True, exist_ok=True)
        write_atomically(path / ".writable", b"")
        (path / ".writable").unlink()
    except OSError as error:
        raise folder_error(path, error) from error


def folder_error(path: Path, error: OSError) -> MachineError:
    """The error to raise where a folder for results cannot be made or written to."""
    return MachineError(
        f"cannot write to {path}: {why_not_written(error)}; choose another folder with out=... (--out FOLDER)"
    )


def why_not_written(error: OSError) -> str:
    """The reason of a failed write, in plain words."""
    return {
        errno.EACCES: "no permission to write",
        errno.EPERM: "no permission to write",
        errno.EROFS: "the file system is read-only",
        errno.ENOSPC: "no space left",
        errno.EDQUOT: "the disk quota is used up",
        errno.ENOTDIR: "a part of the path is a file",
        errno.EEXIST: "it is a file, not a folder",
    }.get(error.errno or 0, error.strerror or str(error))
