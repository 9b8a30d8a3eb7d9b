"""Layers of which every rank holds some columns, rows or words, and the differentiable collectives between them.

TensorParallel puts the layers in place of the dense ones. Inside the sharded part of a model every rank has its own
columns of the activations; outside, all ranks have the same (tensor parallelism) or each has its own rows of the
sequence (sequence parallelism). Each collective's backward is another one's forward. Shards may be unequal: rank r has
columns or rows bounds[r] to bounds[r + 1].

`vocabulary_cross_entropy` is their loss: for a head whose outputs stay sharded, without ever gathering all scores.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uneven.comm.collectives import all_gather_shards, reduce_scatter_shards
from uneven.comm.group import Group
from uneven.policy.apportion import apportion, cut_by


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


class ColumnLinear(nn.Module):
    """Some of a linear layer's outputs, for inputs that all ranks have, or of which each has some `rows`.

    With `gathers` every rank gets all outputs.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        bounds: Sequence[int],
        group: Group,
        *,
        gathers: bool,
        rows: SequenceShards | None = None,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)
        self.bounds = list(bounds)
        self.group = group
        self.gathers = gathers
        self._rows = rows

    def forward(self, x: Tensor) -> Tensor:
        if self._rows is None:
            own = column_linear(x, self.weight, self.bias, self.group)
        else:  # the gather's backward sums the input's gradient
            own = F.linear(all_gather_rows(x, self._rows), self.weight, self.bias)
        return all_gather_columns(own, self.bounds, self.group) if self.gathers else own


class RowLinear(nn.Module):
    """A linear layer that sees some of its inputs; the ranks' results are summed, then the bias is added once."""

    bias: nn.Parameter | None

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, group: Group, rows: SequenceShards | None = None
    ) -> None:
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)
        self._group, self._rows = group, rows

    def forward(self, x: Tensor) -> Tensor:
        total = _reduced(F.linear(x, self.weight), self._group, self._rows)
        return total if self.bias is None else total + self.bias


class VocabularyEmbedding(nn.Module):
    """An embedding that has some of the words; the rows of other words come from the other ranks."""

    def __init__(
        self, weight: nn.Parameter, bounds: Sequence[int], group: Group, rows: SequenceShards | None = None
    ) -> None:
        super().__init__()
        self.weight = weight
        self._bounds = list(bounds)
        self._group = group
        self._rows = rows

    def forward(self, tokens: Tensor) -> Tensor:
        place = tokens - self._bounds[self._group.rank]
        is_own = (place >= 0) & (place < len(self.weight))
        if len(self.weight):
            rows = F.embedding(place.clamp(0, len(self.weight) - 1), self.weight)
            rows = torch.where(is_own.unsqueeze(-1), rows, 0.0)
        else:
            rows = self.weight.sum() + self.weight.new_zeros(*tokens.shape, self.weight.shape[1])
        return _reduced(rows, self._group, self._rows)


def keep_own_rows(module: nn.Module, rows: SequenceShards) -> Any:
    """Let each rank keep its rows of what the module makes for the whole sequence, such as position embeddings."""

    def take_own(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        rows.split(output.shape[-2])
        return output[..., rows.own, :]

    return module.register_forward_hook(take_own)


def _reduced(partial: Tensor, group: Group, rows: SequenceShards | None) -> Tensor:
    return all_reduce_output(partial, group) if rows is None else reduce_scatter_rows(partial, rows)


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
        return F.linear(x, weight, bias)

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


def vocabulary_cross_entropy(head: nn.Module, scores: Tensor, targets: Tensor) -> Tensor:
    """The loss of every target, as `F.cross_entropy(..., reduction="none")`, from the scores that `head` computed.

    Under strategy 'tensor' or 'sequence' with `Columns()` for the head (without `gathers`), each rank has the scores of
    its own words, and only a maximum and two sums per target are exchanged. With a whole head it is plain PyTorch, so
    one train step works with and without the strategy.
    """
    if isinstance(head, ColumnLinear) and not head.gathers:
        return sharded_cross_entropy(scores, targets, head.bounds, head.group)
    return F.cross_entropy(scores.flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape)


def sharded_cross_entropy(scores: Tensor, targets: Tensor, bounds: Sequence[int], group: Group) -> Tensor:
    """`scores` are this rank's columns of the vocabulary; `targets` are the same on all ranks."""
    losses: Tensor = _CrossEntropy.apply(scores, targets, bounds[group.rank], group)  # type: ignore[no-untyped-call]
    return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, targets: Tensor, first: int, group: Group) -> Tensor:
        lowest = torch.finfo(scores.dtype).min
        largest = scores.amax(-1) if scores.shape[-1] else scores.new_full(targets.shape, lowest)
        largest = group.all_reduce_max(largest.contiguous()).wait()
        powers = (scores - largest.unsqueeze(-1)).exp()
        place = targets - first
        is_own = (place >= 0) & (place < scores.shape[-1])
        place = place.clamp(0, max(0, scores.shape[-1] - 1)).unsqueeze(-1)
        own = scores.gather(-1, place).squeeze(-1) if scores.shape[-1] else torch.zeros_like(largest)
        # Both sums in one collective: the powers, and the target's score, which one rank has.
        sums = group.all_reduce(torch.stack([powers.sum(-1), torch.where(is_own, own - largest, 0.0)])).wait()
        ctx.save_for_backward(powers, sums[0], place, is_own)
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        powers, total, place, is_own = ctx.saved_tensors
        of_scores = powers / total.unsqueeze(-1)
        if of_scores.shape[-1]:
            of_scores.scatter_add_(-1, place, -is_own.unsqueeze(-1).to(of_scores.dtype))
        return of_scores * grads[0].unsqueeze(-1), None, None, None
