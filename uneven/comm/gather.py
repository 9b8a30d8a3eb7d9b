"""All-gather of bytes, JSON, rows of numbers and checksums on the host, built from all-reduce.

Each rank fills its own range of a zeroed buffer, and the sum over ranks fills in the others. Used for statistics,
states and comparisons; for shards of tensors see collectives.py.
"""

import json
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from uneven.comm.group import Group


def gather_bytes(group: Group, data: bytes) -> list[bytes]:
    """Each rank's data, of any length, in rank order; nothing is pickled."""
    lengths = torch.zeros(group.world_size, dtype=torch.int64)
    lengths[group.rank] = len(data)
    sizes: list[int] = group.all_reduce(lengths).wait().tolist()
    start = sum(sizes[: group.rank])
    whole = torch.zeros(sum(sizes), dtype=torch.uint8)
    if data:
        whole[start : start + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if len(whole):
        group.all_reduce(whole).wait()
    return [part.numpy().tobytes() for part in whole.split(sizes)]


def gather_json(group: Group, value: Any) -> list[Any]:
    """Each rank's value, in rank order, as JSON gives it back: tuples are lists then, and all keys are text."""
    return [json.loads(data) for data in gather_bytes(group, json.dumps(value).encode())]


def broadcast_json(group: Group, value: Any, owner: int = 0) -> Any:
    """The owner's value on every rank, as JSON gives it back; what the others pass does not count."""
    own = json.dumps(value).encode() if group.rank == owner else b""
    return json.loads(gather_bytes(group, own)[owner])


def own_row(group: Group, row: Sequence[float]) -> Tensor:
    """A table with a row per rank, zero except for this rank's own: an all-reduce fills in the others."""
    table = torch.zeros(group.world_size, len(row), dtype=torch.float64)
    table[group.rank] = torch.tensor(row, dtype=torch.float64)
    return table


def gather_rows(group: Group, row: Sequence[float]) -> list[list[float]]:
    """Each rank's row of numbers, in rank order; all rows are equally long."""
    rows: list[list[float]] = group.all_reduce(own_row(group, row)).wait().tolist()
    return rows


def checksum(tensors: Iterable[Tensor]) -> int:
    """Of all bits and their order."""
    found = 0
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().flatten()
        found = zlib.crc32(flat.view(torch.uint8).numpy().data, found)
    return found


def gather_checksums(group: Group, tensors: Iterable[Tensor]) -> list[int]:
    """A checksum of each rank's tensors, in rank order: equal exactly when their bits are."""
    return [int(value) for (value,) in gather_rows(group, [float(checksum(tensors))])]
