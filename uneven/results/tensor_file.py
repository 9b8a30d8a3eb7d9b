"""One file of tensors in the safetensors format, written piece by piece with its checksum, and read by the library.

Written by hand because a save runs beside training: the library's writer needs contiguous tensors, and the checksum
would need the file to be read again. Here no more than one tensor is copied (where it is not contiguous), and the
interpreter is free for the training thread while a piece is written or summed. Used by results/state.py and
results/checkpoint.py. Invariant: a tensor is read back bit by bit, whatever its type, shape and layout.
"""

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from uneven.errors import InputError

PIECE = 1 << 20  # bytes written and summed at once
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


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


def write_tensors(path: Path, tensors: Mapping[str, Tensor], tied: Mapping[str, str] | None = None) -> FileSum:
    """Write and sync a new file of tensors; InputError where the format has no type for one of them.

    `tied` is noted as `safetensors.torch.save_model` does it: further name -> the name of its tensor.
    """
    # Widest types first, as the library does it: every tensor then begins at a multiple of its element's size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    return write_pieces(path, _pieces(names, tensors, {"format": "pt", **(tied or {})}))


def write_pieces(path: Path, pieces: Iterable[bytes | memoryview]) -> FileSum:
    """Write and sync a new file from pieces of its content."""
    length = crc = 0
    with path.open("wb", buffering=0) as file:
        for piece in pieces:
            left = memoryview(piece)
            while left:
                left = left[file.write(left) :]  # an unbuffered write may stop short, before it reports a full disk
            crc = zlib.crc32(piece, crc)
            length += len(piece)
        os.fsync(file.fileno())
    return FileSum(length, f"{crc:08x}")


def _pieces(
    names: list[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in TYPES:
            raise InputError(f"{name} is of {tensor.dtype}, which a safetensors file cannot hold; convert it")
        end = position + tensor.numel() * tensor.element_size()
        kind = TYPES[tensor.dtype]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        content = _content(tensors[name])
        for first in range(0, len(content), PIECE):
            yield content[first : first + PIECE]


def _content(tensor: Tensor) -> memoryview:
    plain = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


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
        crc = 0
        with path.open("rb", buffering=0) as file:
            while piece := file.read(PIECE):
                crc = zlib.crc32(piece, crc)
    except FileNotFoundError:
        raise InputError(f"{what}: {path.name} is missing") from None
    except OSError as error:
        raise InputError(f"{what}: {path.name} cannot be read: {error.strerror or error}") from error
    if f"{crc:08x}" != expected.crc32:
        raise InputError(f"{what}: {path.name} is damaged: its crc32 is {crc:08x} instead of {expected.crc32}")
