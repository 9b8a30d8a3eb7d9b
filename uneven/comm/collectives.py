"""All-gather and reduce-scatter of unequal shards of a flat buffer, without padding, from a Group's own collectives.

Rank r owns flat[bounds[r]:bounds[r + 1]], which may be empty; all ranks must know the same bounds. PyTorch's own
all-gather and reduce-scatter want equal shards, or refuse unequal ones on Gloo.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from torch import Tensor

from uneven.comm.group import Group
from uneven.comm.work import WorkList


def broadcast_params(group: Group, tensors: Iterable[Tensor]) -> None:
    """Overwrite all tensors by rank 0's values."""
    WorkList([group.broadcast(tensor.detach()) for tensor in tensors]).wait()


def all_gather_shards(
    group: Group, flat: Tensor, bounds: Sequence[int], aside: Mapping[int, Tensor] | None = None
) -> WorkList:
    """Every owner's shard to all ranks: one broadcast per owner, on Gloo faster than an all-gather of equal shards.

    `aside`: by owner, other tensors of this rank's in which shards arrive, in place of their range of `flat`.
    """
    found = aside or {}
    return WorkList([group.broadcast(found.get(owner, shard), owner) for owner, shard in _shards(flat, bounds)])


def reduce_scatter_shards(group: Group, flat: Tensor, bounds: Sequence[int], *, to_all: bool = False) -> WorkList:
    """Every shard summed at its owner; what a rank then holds of the others' shards is undefined.

    Gloo all-reduces the whole buffer in less time than it reduces shards to their owners, in the same memory. `to_all`
    asks for that on NCCL too: other ranks need sums that are not their own.
    """
    if to_all or not group.is_nccl(flat):
        return WorkList([group.all_reduce(flat)] if flat.numel() else [])
    return WorkList([group.reduce(shard, owner) for owner, shard in _shards(flat, bounds)])


def _shards(flat: Tensor, bounds: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    assert flat.dim() == 1, "shards are ranges of a flat buffer"
    assert (bounds[0], bounds[-1]) == (0, len(flat)), f"bounds {list(bounds)} do not cover {len(flat)} elements"
    for owner, (start, stop) in enumerate(pairwise(bounds)):
        if stop > start:
            yield owner, flat[start:stop]
