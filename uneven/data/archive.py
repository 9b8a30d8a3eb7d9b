"""Read the canonical files of a set from a plain file or a gzip, tar or zip archive.

Members are matched by base name and read into memory up to the described size. Nothing is extracted to a path that
the archive chooses, so a malicious archive can neither overwrite files nor fill the disk or memory.
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

# Exceptions of the stdlib readers for truncated or invalid content.
UNREADABLE = (
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
    """The regular files of an archive as (full name, stream); a stream is valid until the next iteration."""
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
    """Those of the `wanted` files that `path` holds, under their name or an alias, as (name, content)."""
    by_name = {name: file for file in wanted for name in (file.name, *file.aliases)}
    for name, stream in members(path):
        file = by_name.get(PurePosixPath(name).name)
        if file is not None:
            # One byte more than expected, so that a longer file fails its checksum instead of being cut to size.
            yield file.name, stream.read(file.num_bytes + 1)
