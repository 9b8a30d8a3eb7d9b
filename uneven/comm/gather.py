"""Everyone's bytes to everyone, over the sums that every group has."""

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

from uneven.comm.group import Group


def gather_bytes(group: Group, data: bytes) -> list[bytes]:
    """Each rank's data in rank order, whatever the lengths. Sums of disjoint ranges: nothing is ever unpickled."""
    lengths = torch.zeros(group.size, dtype=torch.int64)
    lengths[group.rank] = len(data)
    sizes: list[int] = group.sum_(lengths).wait().tolist()
    start = sum(sizes[: group.rank])
    whole = torch.zeros(sum(sizes), dtype=torch.uint8)
    if data:
        whole[start : start + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if len(whole):
        group.sum_(whole).wait()
    return [part.numpy().tobytes() for part in whole.split(sizes)]


def gather_checksums(group: Group, tensors: Iterable[Tensor]) -> list[int]:
    """A checksum of each rank's tensors, in rank order: equal exactly when their bits are."""
    checksum = 0
    for tensor in tensors:
        checksum = zlib.crc32(
            tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes(), checksum
        )
    own = torch.zeros(group.size, dtype=torch.int64)
    own[group.rank] = checksum
    checksums: list[int] = group.sum_(own).wait().tolist()
    return checksums
