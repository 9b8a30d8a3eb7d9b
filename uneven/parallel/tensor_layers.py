"""Layers of which every rank holds some columns, rows or words; TensorParallel puts them in place of the dense ones.

`vocabulary_cross_entropy` is their loss: for a head whose outputs stay sharded, without ever gathering all scores.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uneven.comm.group import Group
from uneven.parallel.tensor_collectives import (
    SequenceShards,
    all_gather_columns,
    all_gather_rows,
    all_reduce_output,
    column_linear,
    reduce_scatter_rows,
)


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
