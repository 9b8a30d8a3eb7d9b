"""One file of tensors in the safetensors format, with its checksum.

The library writes it from where the tensors are, without a copy, and the interpreter is free meanwhile: a save runs
beside training. Used by results/state.py and results/checkpoint.py. Invariant: a tensor is read back bit by bit,
whatever its type, shape and layout.
"""

import errno
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor

from uneven.errors import InputError
from uneven.files import umask

PIECE = 1 << 20  # bytes read and summed at once


class FileSum(NamedTuple):
    """Length and checksum of a file, as state.json lists them."""

    length: int
    crc32: str  # 8 hex digits

    @classmethod
    def of(cls, content: bytes) -> "FileSum":
        return cls(len(content), f"{zlib.crc32(content):08x}")

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> "FileSum":
        return cls(int(entry["bytes"]), str(entry["crc32"]))

    def to_json(self) -> dict[str, Any]:
        return {"bytes": self.length, "crc32": self.crc32}


@cache
def can_hold(dtype: torch.dtype) -> bool:
    """Whether the format has a name for this type."""
    try:
        save({"": torch.empty(0, dtype=dtype)})
    except KeyError:
        return False
    return True


def write_tensors(path: Path, tensors: Mapping[str, Tensor], tied: Mapping[str, str] | None = None) -> FileSum:
    """Write and sync a new file of tensors; InputError where the format has no type for one of them.

    `tied` is noted as `safetensors.torch.save_model` does it: further name -> the name of its tensor.
    """
    plain: dict[str, Tensor] = {}
    places: set[int] = set()
    for name, tensor in tensors.items():
        if not can_hold(tensor.dtype):
            raise InputError(f"{name} is of {tensor.dtype}, which a safetensors file cannot hold; convert it")
        whole = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
        place = whole.untyped_storage().data_ptr()
        plain[name] = whole.clone() if place in places else whole  # the library refuses tensors that share memory
        places.add(place)
    try:
        save_file(plain, path, {"format": "pt", **(tied or {})})
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        code = int(found[1]) if found else errno.EIO
        raise OSError(code, os.strerror(code), str(path)) from error
    path.chmod(0o666 & ~umask())  # the library makes it private
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return _sum_of(path)


def write_file(path: Path, content: bytes) -> FileSum:
    """Write and sync a new file."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileSum.of(content)


def _sum_of(path: Path) -> FileSum:
    length = crc = 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(PIECE):
            crc = zlib.crc32(piece, crc)
            length += len(piece)
    return FileSum(length, f"{crc:08x}")


class TensorFile(Mapping[str, Tensor]):
    """The tensors of a file by name; each is read when it is asked for, into memory of its own.

    The file stays open: it may be removed meanwhile, as a checkpoint that a resumed run prunes.
    """

    def __init__(self, path: Path) -> None:
        self._file = cast(Any, safe_open(path, framework="pt"))
        self._names = tuple(self._file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: Tensor = self._file.get_tensor(name)
        return tensor.clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def open_tensors(path: Path, what: str) -> TensorFile:
    """A file of tensors; InputError in one line that begins with `what` where it cannot be read."""
    try:
        return TensorFile(path)
    except FileNotFoundError:
        raise InputError(f"{what}: {path.name} is missing") from None
    except (OSError, SafetensorError) as error:
        raise InputError(f"{what}: {path.name} is damaged: {error}") from error


def check_file(path: Path, expected: FileSum, what: str) -> None:
    """InputError in one line unless a file has this length and checksum."""
    try:
        length = path.stat().st_size
        if length != expected.length:
            raise InputError(f"{what}: {path.name} is damaged: {length} bytes instead of {expected.length}")
        found = _sum_of(path)
    except FileNotFoundError:
        raise InputError(f"{what}: {path.name} is missing") from None
    except OSError as error:
        raise InputError(f"{what}: {path.name} cannot be read: {error.strerror or error}") from error
    if found.crc32 != expected.crc32:
        raise InputError(f"{what}: {path.name} is damaged: its crc32 is {found.crc32} instead of {expected.crc32}")
