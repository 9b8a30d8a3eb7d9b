"""Params that a rank holds a piece of: whole only between `start` and `drop`, for as long as a layer computes.

The whole buffer keeps its place: its storage is emptied and filled again, never replaced, so that what autograd saved
of a param is right again when backward needs it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from uneven.comm.collectives import gather_pieces
from uneven.comm.group import Group
from uneven.comm.work import Works
from uneven.parallel.buckets import view_like
from uneven.parallel.pieces import Pieces, Segment


class Shards(Pieces):
    """`own` is this rank's piece, the only copy that lasts; the optimizer updates it.

    With `compute_dtype` params are whole in that type (and gradients arrive in it), while pieces and sums of gradients
    keep the type the params were made in.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], shares: Sequence[float], rank: int, compute_dtype: torch.dtype | None
    ) -> None:
        super().__init__(params, shares, by_tensors=False)
        self._begin, self._end = self.cut[rank], self.cut[rank + 1]
        self.own = self.flat[self._begin : self._end].clone()
        self.is_whole = True
        if compute_dtype is not None and compute_dtype != self.flat.dtype:
            self._move_to(torch.empty_like(self.flat, dtype=compute_dtype))
        self.drop()

    def start(self, group: Group) -> Works:
        """Make the params whole; they are when the works have been waited for."""
        assert not self.is_whole
        self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
        self.flat[self._begin : self._end] = self.own
        self.is_whole = True
        return gather_pieces(group, self.flat, self.cut)

    def drop(self) -> None:
        """Nothing but the own piece is left; the params must not be read."""
        self.flat.untyped_storage().resize_(0)
        self.is_whole = False

    def own_part(self, segment: Segment) -> Tensor:
        """What this rank owns of one param, as it lasts."""
        begin = self.starts[segment.param] + segment.start - self._begin
        return self.own[begin : begin + segment.stop - segment.start]

    def leaf_of(self, segment: Segment) -> nn.Parameter:
        return nn.Parameter(self.own_part(segment))

    def gather(self, group: Group) -> Works:
        """After a step nothing is sent: the next forward gathers what it needs."""
        del group
        return Works([])

    def _move_to(self, flat: Tensor) -> None:
        """Its values do not matter: they are gathered before anybody reads them."""
        self.flat = flat
        for param, start in self.starts.items():
            param.data = view_like(param, flat, start)
