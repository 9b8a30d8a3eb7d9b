"""Differentiable collectives of tensor and sequence parallelism: each function's backward is another one's forward.

Inside the sharded part of a model every rank has its own columns of the activations; outside, all ranks have the same
(tensor parallelism) or each has its own rows of the sequence (sequence parallelism). Shards may be unequal: rank r
has columns or rows bounds[r] to bounds[r + 1].
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from uneven.comm.collectives import all_gather_shards, reduce_scatter_shards
from uneven.comm.group import Group
from uneven.policy.apportion import apportion, cut_by


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
    """This rank's columns of a linear layer's output. Backward sums the input's gradient over ranks while it computes
    the weight's.
    """
    columns: Tensor = _ColumnLinear.apply(x, weight, bias, group)  # type: ignore[no-untyped-call]
    return columns


def all_reduce_output(x: Tensor, group: Group) -> Tensor:
    """The sum of all ranks' partial results; backward passes on the gradient, which is the same on all ranks."""
    total: Tensor = _AllReduce.apply(x, group)  # type: ignore[no-untyped-call]
    return total


def all_gather_columns(x: Tensor, bounds: Sequence[int], group: Group) -> Tensor:
    """All ranks' columns side by side; backward takes this rank's own."""
    columns: Tensor = _AllGatherColumns.apply(x, bounds, group)  # type: ignore[no-untyped-call]
    return columns


def all_gather_along(x: Tensor, dim: int, bounds: Sequence[int], group: Group) -> Tensor:
    """All ranks' shards of a dimension side by side, without gradients; this rank's are `x`."""
    first = x.movedim(dim, 0)  # a rank's shards lie together in the buffer that is sent
    size = first.shape[1:].numel()
    flat = torch.empty(size * bounds[-1], dtype=x.dtype, device=x.device)
    flat_bounds = [size * bound for bound in bounds]
    flat[flat_bounds[group.rank] : flat_bounds[group.rank + 1]] = first.reshape(-1)
    all_gather_shards(group, flat, flat_bounds).wait()
    return flat.view(bounds[-1], *first.shape[1:]).movedim(0, dim).contiguous()


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.group = bias is not None, group
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        of_x = work = None
        if ctx.needs_input_grad[0]:
            of_x = grad @ weight
            work = ctx.group.all_reduce(of_x)
        rows = x.shape[:-1].numel()  # not -1 below: a rank may have no columns
        flat = grad.reshape(rows, grad.shape[-1])
        of_weight = flat.T @ x.reshape(rows, x.shape[-1]) if ctx.needs_input_grad[1] else None
        of_bias = flat.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        if work is not None:
            work.wait()
        return of_x, of_weight, of_bias, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        del ctx
        total = x.clone(memory_format=torch.contiguous_format)  # autograd may have saved x
        group.all_reduce(total).wait()
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        del ctx
        return grads[0], None


class _AllGatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bounds: Sequence[int], group: Group) -> Tensor:
        ctx.own = slice(bounds[group.rank], bounds[group.rank + 1])
        return all_gather_along(x, -1, bounds, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0][..., ctx.own].contiguous(), None, None


class SequenceShards:
    """Which rank has which rows of a sequence, for the length of the last sequence that was split."""

    def __init__(self, shares: Sequence[float], group: Group) -> None:
        self._shares = shares
        self.group = group
        self.bounds = [0] * (group.world_size + 1)

    def split(self, length: int) -> None:
        self.bounds = cut_by(apportion(length, self._shares))

    @property
    def own(self) -> slice:
        return slice(self.bounds[self.group.rank], self.bounds[self.group.rank + 1])


def reduce_scatter_rows(x: Tensor, rows: SequenceShards) -> Tensor:
    """This rank's rows of the sum of all ranks' partial results; backward all-gathers."""
    rows.split(x.shape[-2])
    own: Tensor = _ExchangeRows.apply(x, rows, False)  # type: ignore[no-untyped-call]
    return own


def all_gather_rows(x: Tensor, rows: SequenceShards) -> Tensor:
    """The whole sequence from all ranks' rows; backward reduce-scatters the gradients."""
    sequence: Tensor = _ExchangeRows.apply(x, rows, True)  # type: ignore[no-untyped-call]
    return sequence


def _reduce_scatter(x: Tensor, bounds: Sequence[int], group: Group) -> Tensor:
    by_row = x.movedim(-2, 0).clone(memory_format=torch.contiguous_format)  # autograd may have saved x
    row_size = by_row.shape[1:].numel()
    flat = by_row.view(-1)
    reduce_scatter_shards(group, flat, [row_size * bound for bound in bounds]).wait()
    start, stop = bounds[group.rank], bounds[group.rank + 1]
    own = flat[row_size * start : row_size * stop]
    return own.view(stop - start, *by_row.shape[1:]).movedim(0, -2).contiguous()


def _all_gather(x: Tensor, bounds: Sequence[int], group: Group) -> Tensor:
    return all_gather_along(x, -2, bounds, group)


class _ExchangeRows(torch.autograd.Function):
    """All-gather or reduce-scatter; backward does the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: SequenceShards, gathers: bool) -> Tensor:
        ctx.back = _reduce_scatter if gathers else _all_gather
        ctx.bounds, ctx.group = rows.bounds, rows.group
        return (_all_gather if gathers else _reduce_scatter)(x, rows.bounds, rows.group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grads[0], ctx.bounds, ctx.group), None, None
