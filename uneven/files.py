"""Writing files so that a reader never meets half of one, whatever dies in between."""

import errno
import os
import tempfile
from pathlib import Path

from uneven.errors import MachineError


def write_atomically(path: Path, content: bytes, work: Path | None = None) -> None:
    """The file holds either its old content or all of the new; `work` is a folder for the unfinished one."""
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
    # Without this a power cut after the rename can still lose the name.
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_out_folder(path: Path) -> None:
    """An empty folder for a run's results; an older run there is moved aside, never overwritten."""
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
    return MachineError(
        f"cannot write to {path}: {why_not_written(error)}; choose another folder with out=... (--out FOLDER)"
    )


def why_not_written(error: OSError) -> str:
    """The reason of a failed write, in words."""
    return {
        errno.EACCES: "no permission to write",
        errno.EPERM: "no permission to write",
        errno.EROFS: "the file system is read-only",
        errno.ENOSPC: "no space left",
        errno.EDQUOT: "the disk quota is used up",
        errno.ENOTDIR: "a part of the path is a file",
        errno.EEXIST: "it is a file, not a folder",
    }.get(error.errno or 0, error.strerror or str(error))
