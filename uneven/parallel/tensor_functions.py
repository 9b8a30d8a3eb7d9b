"""What tensor parallelism puts on the wire: four functions, each with the other's backward. Pieces may be unequal.

Inside the split part of a model every rank has its own columns of the activations, outside all have the same.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from uneven.comm.collectives import gather_pieces
from uneven.comm.group import Group


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
    """This rank's columns of a linear layer's output. Backward sums the input's gradient over ranks while it computes
    the weight's.
    """
    found: Tensor = _ColumnLinear.apply(x, weight, bias, group)  # type: ignore[no-untyped-call]
    return found


def sum_over_ranks(x: Tensor, group: Group) -> Tensor:
    """Partial results made whole; backward passes the gradient on as it is, which all ranks have alike."""
    found: Tensor = _Sum.apply(x, group)  # type: ignore[no-untyped-call]
    return found


def gather_last(x: Tensor, cut: Sequence[int], group: Group) -> Tensor:
    """Everyone's columns side by side; backward takes this rank's own."""
    found: Tensor = _GatherLast.apply(x, cut, group)  # type: ignore[no-untyped-call]
    return found


def join_last(x: Tensor, cut: Sequence[int], group: Group) -> Tensor:
    """Everyone's columns side by side, without gradients. The pieces of a rank lie together on the wire."""
    rows = x.shape[:-1].numel()
    flat = torch.empty(rows * cut[-1], dtype=x.dtype, device=x.device)
    borders = [rows * place for place in cut]
    flat[borders[group.rank] : borders[group.rank + 1]] = x.reshape(-1)
    gather_pieces(group, flat, borders).wait()
    parts = [
        flat[start:stop].view(*x.shape[:-1], (stop - start) // rows if rows else 0) for start, stop in pairwise(borders)
    ]
    return torch.cat(parts, -1)


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
        rows = x.shape[:-1].numel()  # told, since a rank may have no columns
        flat = grad.reshape(rows, grad.shape[-1])
        of_weight = flat.T @ x.reshape(rows, x.shape[-1]) if ctx.needs_input_grad[1] else None
        of_bias = flat.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        if work is not None:
            work.wait()
        return of_x, of_weight, of_bias, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        del ctx
        total = x.clone(memory_format=torch.contiguous_format)  # autograd may have saved what is summed
        group.all_reduce(total).wait()
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        del ctx
        return grads[0], None


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Sequence[int], group: Group) -> Tensor:
        ctx.own = slice(cut[group.rank], cut[group.rank + 1])
        return join_last(x, cut, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0][..., ctx.own].contiguous(), None, None
