"""state.json, the record of a folder: what it holds, with length and checksum of every other file.

Written last, so that a folder with a record is complete. Its first line is a checksum of itself: a flipped digit would
otherwise resume at another slot. Used by results/state.py (results) and results/checkpoint.py (checkpoints); reading
needs no tensor and no code of the user's.
"""

import json
import platform
import re
import zlib
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from uneven.errors import InputError
from uneven.results.tensor_file import FileSum, check_file
from uneven.version import __version__

VERSION = 2
RECORD = "state.json"
_FIRST_LINE = re.compile(rb'\{"crc32": "([0-9a-f]{8})",\n')
_SLICE = 1000  # entries of a long list that are encoded at once: the interpreter is not free meanwhile


def record_head(kind: str, files: Mapping[str, FileSum]) -> dict[str, Any]:
    """The entries that every record has, of a "checkpoint" or a "result"."""
    return {
        "version": VERSION,
        "kind": kind,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"uneven": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "files": {name: sums.to_json() for name, sums in files.items()},
    }


def encode(record: Mapping[str, Any]) -> bytes:
    """A record as JSON, an entry a line; the first is a checksum of the others."""
    text = b"".join(_lines(record))
    return b'{"crc32": "%08x",\n' % zlib.crc32(text) + text


def _lines(record: Mapping[str, Any]) -> Iterator[bytes]:
    for number, (name, value) in enumerate(record.items()):
        yield (",\n" if number else "").encode() + f"{json.dumps(name)}: ".encode()
        if isinstance(value, list) and len(value) > _SLICE:
            for first in range(0, len(value), _SLICE):
                text = json.dumps(value[first : first + _SLICE])[1:-1]
                yield ("[" if first == 0 else ", ").encode() + text.encode()
            yield b"]"
        else:
            yield json.dumps(value).encode()
    yield b"\n}\n"


def read_record(folder: Path, what: str | None = None) -> dict[str, Any]:
    """The record of a checkpoint or result, without the tensors; InputError in one line where it is not whole.

    The other files are not looked at: `check_files` does that.
    """
    what = what or describe(folder)
    try:
        content = (folder / RECORD).read_bytes()
        record = json.loads(content)
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{what}: {RECORD} is missing, so it was never finished, or is no folder of a run") from None
    except OSError as error:
        raise InputError(f"{what}: {RECORD} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{what}: {RECORD} is damaged: {error}") from error
    if not isinstance(record, dict) or "version" not in record:
        raise InputError(f"{what}: {RECORD} is not the record of a run of uneven")
    first_line = _FIRST_LINE.match(content)
    if first_line is None:
        raise InputError(f"{what}: {RECORD} is damaged: it does not begin with its own crc32")
    expected, found = first_line[1].decode(), f"{zlib.crc32(content[first_line.end() :]):08x}"
    if expected != found:
        raise InputError(f"{what}: {RECORD} is damaged: its crc32 is {found} instead of {expected}")
    if record["version"] != VERSION:
        raise InputError(
            f"{what}: {RECORD} has version {record['version']!r} of the format, written by uneven "
            f"{record['versions']['uneven']}; this is uneven {__version__}, which reads version {VERSION}: use the "
            "uneven that wrote it"
        )
    del record["crc32"]
    return record


def crc32_of(path: Path) -> int:
    """Of a small file: by its record a folder is told from another one of the same path."""
    return zlib.crc32(path.read_bytes())


def describe(folder: Path) -> str:
    """How messages name a folder."""
    return f"checkpoint {folder}"


def listed_files(record: Mapping[str, Any]) -> dict[str, FileSum]:
    """Length and checksum of every other file of the folder."""
    return {name: FileSum.from_json(sums) for name, sums in record["files"].items()}


def check_files(
    folder: Path, record: Mapping[str, Any], what: str | None = None, left_out: Collection[str] = ()
) -> None:
    """InputError in one line unless all files that the record lists, but those left out, have their checksums."""
    what = what or describe(folder)
    for name, expected in listed_files(record).items():
        if name not in left_out:
            check_file(folder / name, expected, what)


def has_all_files(folder: Path, record: Mapping[str, Any]) -> bool:
    """The quick half of `check_files`: all files are there and as long as they should be."""
    sizes = {name: sums.length for name, sums in listed_files(record).items()}
    return all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in sizes.items())
