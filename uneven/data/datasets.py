"""The known data sets: load or download them by name. Without torch.

    from uneven.data import datasets
    digits = datasets.load("mnist", download=True)      # ImageArrays
    text = datasets.load("shakespeare")                 # TextArrays

A set is defined by its canonical files, whose checksums are in one table below; they were compared with the published
ones. Only bytes with these checksums are stored and returned, so it does not matter where they came from. A subset has
its own name, so it is never loaded in place of the full set.

[Note: data folder] Each set has a sub-folder with its canonical files; raw files and archives under their well-known
names in the data folder itself are read too. A file gets its name only when it is complete, verified and on disk
(write elsewhere, fsync, rename), so a reader never sees a partial one. Only the holder of the set's lock writes. The
next holder deletes what a killed process left in the work folder, except `*.part` files, which a download resumes.
"""

import errno
import fcntl
import gzip
import hashlib
import lzma
import os
import shutil
import tarfile
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Literal, cast, overload
from urllib.parse import urlsplit

from uneven.data.arrays import (
    Arrays,
    Contents,
    ImageArrays,
    TextArrays,
    images_from_cifar_batches,
    images_from_idx,
    load_mini,
    tokens_from_text,
)
from uneven.data.download import DownloadError, Event, Progress, download
from uneven.errors import InputError, MachineError
from uneven.files import home_folder, why_not_written, write_atomically

__all__ = ["Event", "Fetched", "ImageArrays", "Presence", "Progress", "TextArrays", "get", "load", "names", "presence"]

Folder = str | os.PathLike[str] | None
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# Exceptions of the stdlib readers for truncated or invalid content.
_UNREADABLE = (EOFError, gzip.BadGzipFile, tarfile.TarError, zlib.error, lzma.LZMAError, ValueError)


@dataclass(frozen=True)
class File:
    """A canonical file of a set: its name in the data folder, its size and SHA-256, another name it is published as."""

    name: str
    num_bytes: int
    sha256: str
    alias: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, self.alias) if self.alias else (self.name,)

    def fault(self, content: bytes) -> str | None:
        """How `content` differs from this file in size or checksum; None if it is this file."""
        digest = hashlib.sha256(content).hexdigest()
        if digest == self.sha256:
            return None
        if len(content) < self.num_bytes:
            return f"{self.name} has {len(content):,} bytes, not {self.num_bytes:,}"
        return f"{self.name} has SHA-256 {digest[:12]}..., not {self.sha256[:12]}..."


@dataclass(frozen=True)
class DataSet:
    """A set without files is embedded in the package. `mirrors` are tried in order; each is one or several URLs.

    `by_hand` are paths below the data folder where other tools (torchvision, a browser) put the same files: folders,
    or an archive.
    """

    name: str
    title: str
    licence: str
    assemble: Callable[[Contents], Arrays]
    files: tuple[File, ...] = ()
    mirrors: tuple[tuple[str, ...], ...] = ()
    download_bytes: int = 0
    by_hand: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


_MNIST_LICENCE = "CC BY-SA 3.0 (LeCun, Cortes, Burges)"
_MNIST = {  # name: bytes, SHA-256, the name that some unpackers give it
    "train-images-idx3-ubyte": (
        47_040_016,
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-images.idx3-ubyte",
    ),
    "train-labels-idx1-ubyte": (
        60_008,
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "train-labels.idx1-ubyte",
    ),
    "t10k-images-idx3-ubyte": (
        7_840_016,
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-images.idx3-ubyte",
    ),
    "t10k-labels-idx1-ubyte": (
        10_008,
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        "t10k-labels.idx1-ubyte",
    ),
}
_CIFAR = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
DATA_SETS = {
    entry.name: entry
    for entry in (
        DataSet(
            name="mnist-mini",
            title="the first 10,000 + 2,000 images of MNIST, inside the package",
            licence=_MNIST_LICENCE,
            assemble=images_from_idx,
        ),
        DataSet(
            name="mnist",
            title="MNIST: 60,000 + 10,000 handwritten digits, 28x28 grey",
            licence=_MNIST_LICENCE,
            assemble=images_from_idx,
            files=tuple(File(name, size, sha256, alias) for name, (size, sha256, alias) in _MNIST.items()),
            mirrors=(
                tuple(f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}.gz" for name in _MNIST),
                tuple(f"https://storage.googleapis.com/cvdf-datasets/mnist/{name}.gz" for name in _MNIST),
            ),
            download_bytes=11_594_722,
            by_hand=("MNIST/raw",),
        ),
        DataSet(
            name="cifar10",
            title="CIFAR-10: 50,000 + 10,000 photographs in 10 classes, 32x32 RGB",
            licence="none stated by its authors (Krizhevsky, Nair, Hinton); cite their report",
            assemble=images_from_cifar_batches,
            files=tuple(File(name, 30_730_000, sha256) for name, sha256 in _CIFAR.items()),
            mirrors=(("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),),
            download_bytes=170_052_171,
            by_hand=("cifar-10-batches-bin", "cifar-10-binary.tar.gz"),
        ),
        DataSet(
            name="shakespeare",
            title="tiny Shakespeare: 1,115,394 characters, 65 distinct",
            licence="public domain",
            assemble=tokens_from_text,
            files=(
                File(
                    "tinyshakespeare.txt",
                    1_115_394,
                    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
                    "input.txt",
                ),
            ),
            mirrors=(
                (
                    "https://raw.githubusercontent.com/karpathy/char-rnn/"
                    "6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/data/tinyshakespeare/input.txt",
                ),
            ),
            download_bytes=1_115_394,
        ),
    )
}


@dataclass(frozen=True)
class Presence:
    """Whether a set is on this machine; `places` are the paths of its files, empty unless all are present."""

    name: str
    title: str
    licence: str
    num_bytes: int
    is_embedded: bool
    places: tuple[Path, ...]

    @property
    def is_here(self) -> bool:
        return self.is_embedded or bool(self.places)


@dataclass(frozen=True)
class Fetched:
    """Result of `get`: the folder that holds the set and the host used ("" if the set was already present)."""

    name: str
    folder: Path
    source: str


def names() -> tuple[str, ...]:
    """The names that `load` and `get` accept."""
    return tuple(DATA_SETS)


def find_set(name: str) -> DataSet:
    if name not in DATA_SETS:
        raise InputError(f"unknown data set {name!r}; choose one of {', '.join(DATA_SETS)}; see: uneven data list")
    return DATA_SETS[name]


@overload
def load(
    name: Literal["mnist-mini", "mnist", "cifar10"],
    folder: Folder = None,
    download: bool = False,
    progress: Progress | None = None,
) -> ImageArrays: ...
@overload
def load(
    name: Literal["shakespeare"],
    folder: Folder = None,
    download: bool = False,
    progress: Progress | None = None,
) -> TextArrays: ...
@overload
def load(name: str, folder: Folder = None, download: bool = False, progress: Progress | None = None) -> Arrays: ...
def load(name: str, folder: Folder = None, download: bool = False, progress: Progress | None = None) -> Arrays:
    """The arrays of a set, verified by checksum.

    folder: the data folder, by default $UNEVEN_DATA, else the user's cache folder. download: download files that are
    missing or damaged; without it they are a MachineError that names the command to run.
    """
    entry = find_set(name)
    if not entry.files:
        return load_mini()
    if download:
        get(name, folder, progress=progress)
    root = data_folder(folder)
    paths = locate(entry, root)
    if len(paths) < len(entry.files):
        command = f"uneven data get {name}" if folder is None else f"UNEVEN_DATA={folder} uneven data get {name}"
        raise MachineError(f"{name} is not on this machine (looked in {root}); get it with: {command}")
    return entry.assemble(read(entry, paths))


def get(name: str, folder: Folder = None, *, force: bool = False, progress: Progress | None = None) -> Fetched:
    """Download the files of a set that are missing or damaged; with `force` download all of them again.

    A mirror that fails is reported as progress; MachineError is raised only after all have failed.
    """
    entry, root = find_set(name), data_folder(folder)
    show = progress or _ignore
    if not entry.files or not (force or missing_files(entry, root)):
        return Fetched(name, root, "")
    with _work_folder(entry, root, show) as work:
        # Check again under the lock: the process that held it may have downloaded the set.
        wanted = list(entry.files) if force else missing_files(entry, root)
        if not wanted:
            return Fetched(name, root, "")
        if force:
            with _reporting_write_errors(entry, root):
                for part in work.glob("*.part"):
                    part.unlink()
        _check_space(entry, wanted, root)
        return Fetched(name, root, _fetch(entry, wanted, root, work, show))


def _ignore(event: Event) -> None:
    """The progress of a caller that wants none."""
    del event


def presence(folder: Folder = None) -> list[Presence]:
    """Every known set and whether it is on this machine; checksums are not verified."""
    root, found = data_folder(folder), []
    for entry in DATA_SETS.values():
        paths = locate(entry, root)
        places = tuple(dict.fromkeys(paths.values())) if len(paths) == len(entry.files) else ()
        found.append(Presence(entry.name, entry.title, entry.licence, entry.num_bytes, not entry.files, places))
    return found


def data_folder(folder: Folder = None) -> Path:
    """The given folder, else $UNEVEN_DATA, else `uneven` in the user's cache folder."""
    if folder is not None:
        return Path(folder).expanduser()
    if chosen := os.environ.get("UNEVEN_DATA"):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else home_folder() / ".cache") / "uneven"


def locate(entry: DataSet, folder: Path) -> dict[str, Path]:
    """The path of each canonical file that is present, by name; contents are not verified."""
    paths = {file.name: _locate_file(entry, file, folder) for file in entry.files}
    return {name: path for name, path in paths.items() if path is not None}


def _locate_file(entry: DataSet, file: File, folder: Path) -> Path | None:
    installed = folder / entry.name / file.name
    if installed.is_file():
        return installed  # even with a wrong size: `read` then reports it as damaged
    for parent in (folder, *(folder / name for name in entry.by_hand)):
        if parent.is_file():
            return parent  # an archive
        for name in file.names:
            plain, zipped = parent / name, parent / f"{name}.gz"
            # A name such as input.txt is ambiguous, so the size must match too.
            if plain.is_file() and plain.stat().st_size == file.num_bytes:
                return plain
            if zipped.is_file():
                return zipped
    return None


def read(entry: DataSet, paths: dict[str, Path]) -> Iterator[tuple[str, bytes]]:
    """The (name, content) pairs at `paths`, each verified by its checksum; MachineError for a damaged file."""
    files = {file.name: file for file in entry.files}
    # One pass per path: an archive holds several files and is slow to open.
    for path in dict.fromkeys(paths.values()):
        absent = {name for name, file_path in paths.items() if file_path == path}
        try:
            for name, content in _unpack(path, [files[name] for name in absent]):
                if fault := files[name].fault(content):
                    raise ValueError(fault)
                absent.remove(name)
                yield name, content
            if absent:
                raise ValueError(f"does not contain {min(absent)}")
        except PermissionError as error:
            raise MachineError(f"cannot read {path} ({error.strerror}); {_other_folder_hint(entry)}") from error
        except (*_UNREADABLE, OSError) as error:
            raise MachineError(
                f"{path} is damaged ({error}); repair it with: uneven data get {entry.name} --force"
            ) from error


def missing_files(entry: DataSet, folder: Path) -> list[File]:
    """The files that are absent or fail their checksum."""
    paths = locate(entry, folder)
    good: set[str] = set()
    for path in dict.fromkeys(paths.values()):
        # An archive may hold good files before a damaged one: those count.
        with suppress(MachineError):
            for name, _ in read(entry, {name: file_path for name, file_path in paths.items() if file_path == path}):
                good.add(name)
    return [file for file in entry.files if file.name not in good]


def _unpack(path: Path, wanted: Sequence[File]) -> Iterator[tuple[str, bytes]]:
    """Those of the `wanted` files that a plain file, a gzip or a tar holds, as (name, content).

    Members are matched by base name and read into memory up to the expected size. Nothing is extracted to a path that
    an archive chooses, so a malicious one can neither overwrite files nor fill the disk or memory.
    """
    by_name = {name: file for file in wanted for name in file.names}
    for name, stream in _members(path):
        file = by_name.get(PurePosixPath(name).name)
        if file is not None:
            # One byte more than expected, so that a longer file fails its checksum instead of being cut to size.
            yield file.name, stream.read(file.num_bytes + 1)


def _members(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """The regular files in an archive as (full name, stream); a stream is valid until the next iteration."""
    if path.name.endswith(".tar.gz"):
        with tarfile.open(path) as tar:
            for member in tar:
                content = tar.extractfile(member) if member.isfile() else None
                if content is not None:
                    yield member.name, content
    elif path.name.endswith(".gz"):
        with gzip.open(path, "rb") as unzipped:
            yield path.name.removesuffix(".gz"), cast("IO[bytes]", unzipped)
    else:
        with path.open("rb") as plain:
            yield path.name, plain


def _fetch(entry: DataSet, wanted: list[File], folder: Path, work: Path, progress: Progress) -> str:
    """Try the mirrors in order until every wanted file is stored; the host of the last one used."""
    reasons = []
    for urls in entry.mirrors:
        host = urlsplit(urls[0]).netloc
        progress(Event(f"getting {entry.name} from {host}"))
        try:
            with closing(_contents(entry, urls, wanted, folder, work, progress)) as contents:
                for name, content in contents:
                    file = next(file for file in wanted if file.name == name)
                    if fault := file.fault(content):
                        raise DownloadError(f"wrong content: {fault}")
                    install(entry, file, content, folder, work)
                    wanted.remove(file)
                    progress(Event(f"checked and stored {name}"))
            if not wanted:
                return host
            reasons.append(f"{host}: does not contain {wanted[0].name}")
        except DownloadError as error:
            reasons.append(f"{host}: {error}")
        except _UNREADABLE as error:
            reasons.append(f"{host}: unreadable: {error}")
        progress(Event(f"failed, {reasons[-1]}"))
    by_hand = [name for name in entry.by_hand if "." in name] or [file.names[-1] for file in entry.files]
    smaller = "; or use mnist-mini, which is part of the package" if entry.assemble is images_from_idx else ""
    raise MachineError(
        f"cannot get {entry.name}: {'; '.join(reasons)}; fix the network (proxy?) and run: uneven data get "
        f"{entry.name}; or put {', '.join(by_hand)} into {folder}{smaller}"
    )


def _contents(
    entry: DataSet, urls: tuple[str, ...], wanted: list[File], folder: Path, work: Path, progress: Progress
) -> Generator[tuple[str, bytes], None, None]:
    """The (name, content) pairs of one mirror, not yet verified; downloads are deleted after unpacking."""
    for url in urls:
        name = Path(urlsplit(url).path).name
        if len(urls) > 1 and not any(name.startswith(file.names) for file in wanted):
            continue  # a mirror with one URL per file is asked for the missing files only
        with _reporting_write_errors(entry, folder):
            archive = download(url, work, progress).rename(work / name)
        try:
            yield from _unpack(archive, tuple(wanted))
        finally:
            archive.unlink()


@contextmanager
def _work_folder(entry: DataSet, folder: Path, progress: Progress) -> Iterator[Path]:
    """Hold the set's lock and yield its work folder, which is empty except for `*.part` files.

    Waits while another process holds the lock. The work folder is deleted at the end; after a failure its `*.part`
    files are kept for resuming, unless the disk is full.
    """
    work = folder / f".{entry.name}.work"
    with _reporting_write_errors(entry, folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / f".{entry.name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with _reporting_write_errors(entry, folder):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress(Event(f"another process is downloading {entry.name}; waiting for it"))
                fcntl.flock(lock, fcntl.LOCK_EX)
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


def _remove_leftovers(work: Path) -> None:
    for path in work.iterdir() if work.is_dir() else ():
        if path.suffix != ".part":
            path.unlink(missing_ok=True)
    if work.is_dir() and not any(work.iterdir()):
        work.rmdir()


def install(entry: DataSet, file: File, content: bytes, folder: Path, work: Path) -> None:
    """Store a verified file atomically; see [Note: data folder]."""
    with _reporting_write_errors(entry, folder):
        set_folder = folder / entry.name
        set_folder.mkdir(exist_ok=True)
        write_atomically(set_folder / file.name, content, work)


def _check_space(entry: DataSet, files: Sequence[File], folder: Path) -> None:
    """MachineError if the disk cannot hold the files together with the download they are unpacked from."""
    needed = sum(file.num_bytes for file in files) + entry.download_bytes
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise MachineError(
            f"{entry.name} needs {needed / 1e6:.0f} MB in {folder}, which has {free / 1e6:.0f} MB free; "
            f"{_other_folder_hint(entry)}"
        )


@contextmanager
def _reporting_write_errors(entry: DataSet, folder: Path) -> Iterator[None]:
    """Turn an OSError into a MachineError that names the folder and how to choose another."""
    try:
        yield
    except OSError as error:
        raise MachineError(
            f"cannot write {entry.name} to {folder} ({why_not_written(error)}); {_other_folder_hint(entry)}"
        ) from error


def _other_folder_hint(entry: DataSet) -> str:
    return f"choose another folder: UNEVEN_DATA=/some/folder uneven data get {entry.name}"
