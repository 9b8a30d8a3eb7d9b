"""Read the canonical files of a set out of whatever carries them: a plain file, gzip, tar, zip.

Members are matched by their base name and read into memory, never extracted to a path an archive chose, and
never further than the size the set's description allows, so a hostile archive cannot fill disk or memory.
"""

import gzip
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, cast

from uneven.data.description import File

# What the stdlib readers raise on truncated or foreign content.
BROKEN = (
    EOFError,
    gzip.BadGzipFile,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    ValueError,
)

_TAR_ENDINGS = (".tar", ".tgz", ".tar.gz")
_ZIP_ENDINGS = (".whl", ".zip")


def members(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """The regular files in an archive as (full name, stream); a stream is valid until the next is asked."""
    if path.name.endswith(_ZIP_ENDINGS):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                with archive.open(name) as stream:
                    yield name, stream
    elif path.name.endswith(_TAR_ENDINGS):
        with tarfile.open(path) as tar:
            for member in tar:
                content = tar.extractfile(member) if member.isfile() else None
                if content is not None:
                    yield member.name, content
    elif path.name.endswith(".gz"):
        with gzip.open(path, "rb") as unzipped:
            yield path.name[: -len(".gz")], cast("IO[bytes]", unzipped)
    else:
        with path.open("rb") as plain:
            yield path.name, plain


def unpack_named(path: Path, wanted: Sequence[File]) -> Iterator[tuple[str, bytes]]:
    """The wanted files that `path` holds under their own name or a known other one, as (name, content)."""
    by_name = {name: file for file in wanted for name in (file.name, *file.aliases)}
    for name, stream in members(path):
        file = by_name.get(PurePosixPath(name).name)
        if file is not None:
            # One byte more than right: a longer file then fails its sum instead of passing by its beginning.
            yield file.name, stream.read(file.num_bytes + 1)
