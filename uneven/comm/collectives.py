"""Collectives made of a group's own, above all owner pieces: a flat buffer cut among the ranks, unequal, no padding.

Pieces are gathered from their owners or summed at them.

`cut` has a border more than there are ranks: rank r owns flat[cut[r]:cut[r + 1]], which may be empty. All ranks must
know the same cut. PyTorch's own all-gather and reduce-scatter want equal pieces, or refuse unequal ones on Gloo.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from torch import Tensor

from uneven.comm.group import Group
from uneven.comm.work import Works


def broadcast_params(group: Group, tensors: Iterable[Tensor]) -> None:
    """Rank 0's values of all of them to everyone."""
    Works([group.broadcast(tensor.detach()) for tensor in tensors]).wait()


def gather_pieces(group: Group, flat: Tensor, cut: Sequence[int]) -> Works:
    """Every owner's piece to everyone: one broadcast per owner, on Gloo faster than an all-gather of equal pieces."""
    return Works([group.broadcast(piece, owner) for owner, piece in _pieces(flat, cut)])


def reduce_pieces(group: Group, flat: Tensor, cut: Sequence[int]) -> Works:
    """Every piece summed at its owner; what a rank then holds of the others' pieces is undefined.

    Gloo sums the whole buffer for everyone in less time than it sums pieces at owners, and needs no more memory for it.
    """
    if not group.is_nccl(flat):
        return Works([group.all_reduce(flat)] if flat.numel() else [])
    return Works([group.reduce(piece, owner) for owner, piece in _pieces(flat, cut)])


def _pieces(flat: Tensor, cut: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    assert flat.dim() == 1, "pieces are cut from a flat buffer"
    assert (cut[0], cut[-1]) == (0, len(flat)), f"cut {list(cut)} does not cover {len(flat)} elements"
    for owner, (start, stop) in enumerate(pairwise(cut)):
        if stop > start:
            yield owner, flat[start:stop]
