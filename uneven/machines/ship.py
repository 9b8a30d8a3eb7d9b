"""The script's folder on its way to another machine: text files alone, in an archive that can do no harm.

`pack` on the leader (--ship), `unpack` on a machine that allows it (--allow-ship). Data, checkpoints and pickles stay
where they are: only what a person could have written travels. The archive is read by rules of our own, not tar's:
plain files below one folder, no links, no absolute names, no '..', and a limit on their sizes.
"""

import base64
import difflib
import io
import os
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from uneven.errors import InputError
from uneven.machines.wire import WireError

MOST_BYTES = 16 << 20  # of all files together
MOST_FILES = 2000
CHUNK = 1 << 19  # of an archive in one message, before base64
MOST_DIFF_LINES = 20
MOST_TEXT = 1 << 18
SKIPPED = ("__pycache__", "node_modules", "site-packages", "venv")
PICKLES = (".pkl", ".pickle", ".pt", ".pth", ".ckpt", ".bin", ".joblib", ".npy", ".npz", ".safetensors")


def pack(folder: Path) -> bytes:
    """The text files of a folder as an archive; InputError with the largest where they are too many or too large."""
    buffer = io.BytesIO()
    sizes: dict[str, int] = {}
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path in _files(folder):
            content = _text_of(path)
            if content is None:
                continue
            name = path.relative_to(folder).as_posix()
            sizes[name] = len(content)
            if sum(sizes.values()) > MOST_BYTES or len(sizes) > MOST_FILES:
                largest = max(sizes, key=lambda name: sizes[name])
                raise InputError(
                    f"--ship: the text files of {folder} are more than {MOST_BYTES >> 20} MB or {MOST_FILES} files "
                    f"(the largest is {largest}); move the script into a folder of its own"
                )
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def unpack(archive: bytes, folder: Path) -> None:
    """Into an empty folder; WireError where the archive holds anything but plain files below it."""
    written = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as found:
            for count, entry in enumerate(found):
                name = PurePosixPath(entry.name)
                is_inside = not name.is_absolute() and ".." not in name.parts and "\\" not in entry.name
                if not entry.isreg() or not is_inside or not name.parts or ":" in name.parts[0]:
                    raise WireError(f"the archive holds {entry.name!r}, which is no plain file below its folder")
                written += entry.size
                if written > MOST_BYTES or count >= MOST_FILES:
                    raise WireError("the archive holds more than it may")
                content = found.extractfile(entry)
                assert content is not None, "a plain file"
                path = folder.joinpath(*name.parts)
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("xb") as file:  # a name that comes twice is refused
                    file.write(content.read())
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        raise WireError(f"the archive cannot be read: {error}") from error


def chunks(archive: bytes) -> Iterator[str]:
    """The archive in pieces that fit into a message."""
    for first in range(0, len(archive), CHUNK):
        yield base64.b64encode(archive[first : first + CHUNK]).decode()


def join_chunks(pieces: Iterator[str]) -> bytes:
    whole = bytearray()
    for piece in pieces:
        try:
            whole += base64.b64decode(piece, validate=True)
        except ValueError as error:
            raise WireError("the archive did not arrive whole") from error
        if len(whole) > MOST_BYTES:
            raise WireError("the archive is larger than it may be")
    return bytes(whole)


def differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """The files whose digests differ, or that one side lacks."""
    return [name for name in dict.fromkeys((*ours, *theirs)) if ours.get(name) != theirs.get(name)]


def short_diff(theirs: str, ours: str, host: str, name: str) -> list[str]:
    """What the leader's text has in place of theirs, in a few lines."""
    lines = list(
        difflib.unified_diff(
            theirs.splitlines(), ours.splitlines(), f"{host}: {name}", f"leader: {name}", n=1, lineterm=""
        )
    )
    more = len(lines) - MOST_DIFF_LINES
    return lines if more <= 0 else [*lines[:MOST_DIFF_LINES], f"... and {more} lines more"]


def read_script(path: Path) -> str:
    """Its text as far as it is worth comparing; empty where it cannot be read."""
    try:
        return path.read_bytes()[:MOST_TEXT].decode(errors="replace")
    except OSError:
        return ""


def _files(folder: Path) -> Iterator[Path]:
    """Plain files, sorted; hidden ones, caches and environments are left out, links are not followed."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in SKIPPED)
        folders[:] = [name for name in folders if not (Path(place) / name / "pyvenv.cfg").exists()]
        for name in sorted(files):
            path = Path(place) / name
            is_hidden = name.startswith(".") or path.suffix.lower() in PICKLES
            if not is_hidden and path.is_file() and path.resolve().is_relative_to(folder.resolve()):
                yield path


def _text_of(path: Path) -> bytes | None:
    try:
        if path.stat().st_size > MOST_BYTES:
            return None  # no script is as large
        content = path.read_bytes()
        content.decode()
    except (OSError, UnicodeDecodeError):
        return None
    return None if b"\0" in content else content
