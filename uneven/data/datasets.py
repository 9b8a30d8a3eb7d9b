"""The known data sets: load or download them by name. Without torch.

    from uneven.data import datasets
    digits = datasets.load("mnist", download=True)      # ImageArrays
    text = datasets.load("shakespeare")                 # TextArrays

A set is defined by its canonical files, whose checksums are in one table below; they were compared with the published
ones. Only bytes with these checksums are stored and returned, so it does not matter where they came from. A subset has
a name of its own, so it is never loaded in place of the full set.

[Note: data folder] Each set has a sub-folder with its canonical files. A file gets its name only when it is verified
and on disk, so a reader never sees a partial one, and two processes that download the same set do no harm. An archive
of the set's mirror that a user has put there is unpacked in place of a download.
"""

import gzip
import hashlib
import lzma
import os
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO, Literal, overload
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

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
from uneven.errors import InputError, MachineError
from uneven.files import home_folder, why_not_written, write_atomically

__all__ = ["Event", "Fetched", "ImageArrays", "Presence", "Progress", "TextArrays", "get", "load", "names", "presence"]

Folder = str | os.PathLike[str] | None
TIMEOUT_S = 8.0  # without a byte
_CHUNK = 1 << 18
# Exceptions of the stdlib readers for truncated or invalid content.
_UNREADABLE = (EOFError, gzip.BadGzipFile, tarfile.TarError, zlib.error, lzma.LZMAError)


@dataclass(frozen=True)
class Event:
    """A message (`done` is None), or progress of the download `text` in bytes; `total` is None if unknown."""

    text: str
    done: int | None = None
    total: int | None = None


# The library never prints: the command line passes a callback that draws a bar or prints lines.
Progress = Callable[[Event], None]


@dataclass(frozen=True)
class DataSet:
    """A set without files is embedded in the package. `mirrors` are tried in order; each is one or several URLs."""

    name: str
    title: str
    licence: str
    assemble: Callable[[Contents], Arrays]
    files: Mapping[str, str] = field(default_factory=dict)  # name -> SHA-256
    num_bytes: int = 0  # of all files
    mirrors: tuple[tuple[str, ...], ...] = ()


_MNIST_LICENCE = "CC BY-SA 3.0 (LeCun, Cortes, Burges)"
_MNIST = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
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
            files=_MNIST,
            num_bytes=54_950_048,
            mirrors=(
                tuple(f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}.gz" for name in _MNIST),
                tuple(f"https://storage.googleapis.com/cvdf-datasets/mnist/{name}.gz" for name in _MNIST),
            ),
        ),
        DataSet(
            name="cifar10",
            title="CIFAR-10: 50,000 + 10,000 photographs in 10 classes, 32x32 RGB",
            licence="none stated by its authors (Krizhevsky, Nair, Hinton); cite their report",
            assemble=images_from_cifar_batches,
            files=_CIFAR,
            num_bytes=184_380_000,
            mirrors=(("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),),
        ),
        DataSet(
            name="shakespeare",
            title="tiny Shakespeare: 1,115,394 characters, 65 distinct",
            licence="public domain",
            assemble=tokens_from_text,
            files={"tinyshakespeare.txt": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"},
            num_bytes=1_115_394,
            mirrors=(
                (
                    "https://raw.githubusercontent.com/karpathy/char-rnn/"
                    "6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/data/tinyshakespeare/input.txt",
                ),
            ),
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


class _MirrorError(Exception):
    """A mirror cannot be used; the message is the reason."""


def names() -> tuple[str, ...]:
    """The names that `load` and `get` accept."""
    return tuple(DATA_SETS)


def find_set(name: str) -> DataSet:
    if name not in DATA_SETS:
        raise InputError(f"unknown data set {name!r}; choose one of {', '.join(DATA_SETS)}; see: uneven data list")
    return DATA_SETS[name]


@overload
def load(
    name: Literal["mnist-mini", "mnist", "cifar10"], folder: Folder = None, download: bool = False
) -> ImageArrays: ...
@overload
def load(name: Literal["shakespeare"], folder: Folder = None, download: bool = False) -> TextArrays: ...
@overload
def load(name: str, folder: Folder = None, download: bool = False) -> Arrays: ...
def load(name: str, folder: Folder = None, download: bool = False) -> Arrays:
    """The arrays of a set, verified by checksum.

    folder: the data folder, by default $UNEVEN_DATA, else the user's cache folder. download: download files that are
    missing or damaged; without it they are a MachineError that names the command to run.
    """
    entry = find_set(name)
    if not entry.files:
        return load_mini()
    if download:
        get(name, folder)
    root = data_folder(folder)
    if not _places(entry, root):
        command = f"uneven data get {name}" if folder is None else f"UNEVEN_DATA={folder} uneven data get {name}"
        raise MachineError(f"{name} is not on this machine (looked in {root}); get it with: {command}")
    return entry.assemble(_read(entry, root))


def get(name: str, folder: Folder = None, *, force: bool = False, progress: Progress | None = None) -> Fetched:
    """Download the files of a set that are missing or damaged; with `force` download all of them again.

    A mirror that fails is reported as progress; MachineError is raised only after all have failed.
    """
    entry, root = find_set(name), data_folder(folder)
    show = progress or _ignore
    missing = list(entry.files) if force else missing_files(entry, root)
    if not missing:
        return Fetched(name, root, "")
    place, reasons = root / name, []
    try:
        place.mkdir(parents=True, exist_ok=True)
        for urls in entry.mirrors:
            host = urlsplit(urls[0]).netloc
            show(Event(f"getting {name} from {host}"))
            try:
                _fetch(entry, urls, missing, place, show)
                return Fetched(name, root, host)
            except _MirrorError as error:
                reasons.append(f"{host}: {error}")
            show(Event(f"failed, {reasons[-1]}"))
    except OSError as error:
        raise MachineError(
            f"cannot write {name} to {root} ({why_not_written(error)}); choose another folder: "
            f"UNEVEN_DATA=/some/folder uneven data get {name}"
        ) from error
    by_hand = ", ".join(_name(url) for url in entry.mirrors[0])
    raise MachineError(
        f"cannot get {name}: {'; '.join(reasons)}; fix the network (proxy?), or put {by_hand} into {place}; then run: "
        f"uneven data get {name}; or use mnist-mini, which is part of the package"
    )


def _ignore(event: Event) -> None:
    """The progress of a caller that wants none."""
    del event


def presence(folder: Folder = None) -> list[Presence]:
    """Every known set and whether it is on this machine; checksums are not verified."""
    root = data_folder(folder)
    return [
        Presence(entry.name, entry.title, entry.licence, entry.num_bytes, not entry.files, _places(entry, root))
        for entry in DATA_SETS.values()
    ]


def data_folder(folder: Folder = None) -> Path:
    """The given folder, else $UNEVEN_DATA, else `uneven` in the user's cache folder."""
    if folder is not None:
        return Path(folder).expanduser()
    if chosen := os.environ.get("UNEVEN_DATA"):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else home_folder() / ".cache") / "uneven"


def _places(entry: DataSet, root: Path) -> tuple[Path, ...]:
    """The paths of a set's files where all are present; contents are not verified."""
    places = tuple(root / entry.name / name for name in entry.files)
    return places if all(place.is_file() for place in places) else ()


def _read(entry: DataSet, root: Path) -> Iterator[tuple[str, bytes]]:
    """The (name, content) pairs of a set, each verified by its checksum; MachineError for a damaged file."""
    for name, sha256 in entry.files.items():
        path = root / entry.name / name
        content = path.read_bytes()
        if _digest(content) != sha256:
            repair = f"uneven data get {entry.name} --force"
            raise MachineError(f"{path} is damaged (wrong SHA-256); repair it with: {repair}")
        yield name, content


def missing_files(entry: DataSet, root: Path) -> list[str]:
    """The files that are absent or fail their checksum."""
    paths = {name: root / entry.name / name for name in entry.files}
    return [
        name for name, path in paths.items() if not path.is_file() or _digest(path.read_bytes()) != entry.files[name]
    ]


def _fetch(entry: DataSet, urls: tuple[str, ...], missing: list[str], place: Path, show: Progress) -> None:
    """Store all missing files from one mirror, or from its archives that a user has put there; _MirrorError."""
    expected = {entry.files[name]: name for name in missing}
    for url in urls:
        if len(urls) > 1 and not any(_name(url).startswith(name) for name in missing):
            continue  # a mirror with one URL per file is asked for the missing files only
        with tempfile.NamedTemporaryFile(dir=place, prefix=".get-", suffix=f"-{_name(url)}") as file:
            archive = place / _name(url)
            if not archive.is_file():
                _download(url, file, show)
                archive = Path(file.name)
            try:
                for content in _members(archive, most=entry.num_bytes):
                    # By its checksum, whatever name an archive gives to it.
                    if (name := expected.get(_digest(content))) is not None:
                        write_atomically(place / name, content)
                        missing[:] = [other for other in missing if other != name]
                        show(Event(f"checked and stored {name}"))
            except _UNREADABLE as error:
                raise _MirrorError(f"{_name(url)} is unreadable: {error}") from error
    if missing:
        raise _MirrorError(f"wrong content: no file has the SHA-256 of {missing[0]}")


def _download(url: str, file: IO[bytes], show: Progress) -> None:
    """_MirrorError where the network fails; an OSError is a failure to write the file."""
    try:
        # urllib honours the proxy variables.
        response: HTTPResponse = urlopen(Request(url, headers={"User-Agent": "uneven"}), timeout=TIMEOUT_S)
    except HTTPError as error:
        raise _MirrorError(f"HTTP {error.code} {error.reason}") from error
    except (OSError, HTTPException) as error:
        cause = getattr(error, "reason", error)
        raise _MirrorError(getattr(cause, "strerror", None) or str(cause)) from error
    with response:
        length = response.headers.get("Content-Length")
        done, total = 0, int(length) if length else None
        while chunk := _next_chunk(response):
            file.write(chunk)
            done += len(chunk)
            show(Event(_name(url), done, total))
    file.flush()
    if total not in (None, done):
        raise _MirrorError(f"truncated at {done:,} of {total:,} bytes")


def _next_chunk(response: HTTPResponse) -> bytes:
    try:
        return response.read(_CHUNK)
    except (OSError, HTTPException) as error:
        raise _MirrorError(f"the transfer broke off ({type(error).__name__})") from error


def _members(path: Path, most: int) -> Iterator[bytes]:
    """The contents of a plain file, a gzip or a tar.

    Nothing is extracted to a path that an archive chooses, and no more than `most` bytes are read of a file, so a
    malicious one can neither overwrite files nor fill the disk or memory.
    """
    if path.name.endswith(".tar.gz"):
        with tarfile.open(path) as tar:
            for member in tar:
                content = tar.extractfile(member) if member.isfile() else None
                if content is not None:
                    yield content.read(most)
    else:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            yield stream.read(most)


def _name(url: str) -> str:
    return Path(urlsplit(url).path).name


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
