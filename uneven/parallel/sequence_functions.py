"""Between cut layers every rank has some rows of the sequence: gathered before a layer, summed and shared out behind.

Each is the other's backward. Rows go by shares.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from uneven.comm.collectives import gather_pieces, reduce_pieces
from uneven.comm.group import Group
from uneven.policy.apportion import apportion, cut_by


class SharedRows:
    """Who has which rows of sequences, whose length is that of the last one that was shared out."""

    def __init__(self, shares: Sequence[float], group: Group) -> None:
        self._shares = shares
        self.group = group
        self.cut = [0] * (group.world_size + 1)

    def share_out(self, length: int) -> None:
        self.cut = cut_by(apportion(length, self._shares))

    @property
    def own(self) -> slice:
        return slice(self.cut[self.group.rank], self.cut[self.group.rank + 1])


def sum_and_share_out(x: Tensor, rows: SharedRows) -> Tensor:
    """Of everyone's partial results, the sum of this rank's rows; backward gathers."""
    rows.share_out(x.shape[-2])
    found: Tensor = _Exchange.apply(x, rows, False)  # type: ignore[no-untyped-call]
    return found


def gather_rows(x: Tensor, rows: SharedRows) -> Tensor:
    """The whole sequence from everyone's rows; backward sums everyone's gradients of this rank's rows."""
    found: Tensor = _Exchange.apply(x, rows, True)  # type: ignore[no-untyped-call]
    return found


def _scatter(x: Tensor, cut: Sequence[int], group: Group) -> Tensor:
    by_row = x.movedim(-2, 0).clone(memory_format=torch.contiguous_format)  # autograd may have saved what is summed
    each = by_row.shape[1:].numel()
    flat = by_row.view(-1)
    reduce_pieces(group, flat, [each * place for place in cut]).wait()
    own = flat[each * cut[group.rank] : each * cut[group.rank + 1]]
    return own.view(cut[group.rank + 1] - cut[group.rank], *by_row.shape[1:]).movedim(0, -2).contiguous()


def _gather(x: Tensor, cut: Sequence[int], group: Group) -> Tensor:
    by_row = x.movedim(-2, 0)
    each = by_row.shape[1:].numel()
    flat = torch.empty(each * cut[-1], dtype=x.dtype, device=x.device)
    flat[each * cut[group.rank] : each * cut[group.rank + 1]] = by_row.reshape(-1)
    gather_pieces(group, flat, [each * place for place in cut]).wait()
    return flat.view(cut[-1], *by_row.shape[1:]).movedim(0, -2).contiguous()


class _Exchange(torch.autograd.Function):
    """Gathers, or sums and shares out; backward does the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: SharedRows, gathers: bool) -> Tensor:
        ctx.back, ctx.cut, ctx.group = _scatter if gathers else _gather, rows.cut, rows.group
        return (_gather if gathers else _scatter)(x, rows.cut, rows.group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grads[0], ctx.cut, ctx.group), None, None
