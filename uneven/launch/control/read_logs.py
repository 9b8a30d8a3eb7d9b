"""Read what the processes of a run have printed (launch/control/rank_log.py): in the order of time, and as it comes.

Used by `uneven logs`. No torch in this file.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

_NAME = re.compile(r"rank-(\d+)\.log")
STAMP = len("2026-01-01T00:00:00.000")


@dataclass(frozen=True)
class Line:
    """`rank` is None for the launcher."""

    time: str
    rank: int | None
    text: str

    @property
    def name(self) -> str:
        return "launcher" if self.rank is None else f"rank {self.rank}"


@dataclass
class _Place:
    """A file that is being read. It stays open: what it holds can be read when it was renamed or removed, too."""

    path: Path | None = None
    file: BinaryIO | None = None
    rest: bytes = b""  # of a line that is not complete
    last: str = ""  # the time of the last line, for one that has none


@dataclass
class LogReader:
    """The lines of a run's logs: `read` again and again returns those that have come since.

    A log moves from the first folder to the last one when training begins, with all that is in it, and is begun anew
    when it is full. `ranks`: those alone, and not the launcher's; None: all.
    """

    folders: Sequence[Path]
    ranks: Sequence[int] | None = None
    _places: dict[str, _Place] = field(default_factory=dict)

    def read(self) -> list[Line]:
        """In the order of time; lines of one process keep theirs."""
        found: list[Line] = []
        paths = self._paths()
        for name in sorted({*paths, *self._places}):
            found += self._read_file(name, paths.get(name))
        return sorted(found, key=lambda line: line.time)

    def _paths(self) -> dict[str, Path]:
        paths: dict[str, Path] = {}
        for folder in self.folders:
            for path in folder.glob("*.log"):
                rank = _NAME.fullmatch(path.name)
                is_meant = rank is not None and (self.ranks is None or int(rank[1]) in self.ranks)
                if is_meant or (path.name == "launcher.log" and self.ranks is None):
                    paths[path.name] = path
        return paths

    def close(self) -> None:
        for place in self._places.values():
            if place.file is not None:
                place.file.close()

    def _read_file(self, name: str, path: Path | None) -> Iterator[Line]:
        place = self._places.setdefault(name, _Place())
        with suppress(OSError):
            data = b"" if place.file is None else place.file.read()
            if path is not None and not _is_same(place.file, path):
                data += self._open(place, path)
            *lines, place.rest = (place.rest + data).split(b"\n")
            rank = _NAME.fullmatch(name)
            for line in lines:
                text = line.decode(errors="replace")
                if len(text) > STAMP and text[STAMP] == " " and text[10] == "T":
                    place.last, text = text[:STAMP], text[STAMP + 1 :]
                yield Line(place.last, None if rank is None else int(rank[1]), text)

    def _open(self, place: _Place, path: Path) -> bytes:
        """Read on in another file: the first one, the next one after a full one, or where the log has moved to."""
        begin, older = 0, b""
        if place.file is None:
            with suppress(FileNotFoundError):
                older = path.with_name(path.name + ".1").read_bytes()
        else:
            begin = place.file.tell() if place.path != path else 0
            place.file.close()
        place.path, place.file = path, path.open("rb")
        place.file.seek(begin if begin <= os.fstat(place.file.fileno()).st_size else 0)
        return older + place.file.read()


def _is_same(file: BinaryIO | None, path: Path) -> bool:
    return file is not None and os.path.samestat(os.fstat(file.fileno()), path.stat())
