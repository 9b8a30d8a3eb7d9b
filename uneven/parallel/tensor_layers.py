"""Layers of which every rank holds some columns, rows or words; they take the place of the dense ones."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uneven.comm.group import Group
from uneven.parallel.tensor_functions import column_linear, gather_last, sum_over_ranks


class ColumnLinear(nn.Module):
    """Some of a linear layer's outputs. With `gathers` everybody gets all of them."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, cut: Sequence[int], group: Group, *, gathers: bool
    ) -> None:
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)
        self.cut, self._group, self.gathers = list(cut), group, gathers

    def forward(self, x: Tensor) -> Tensor:
        own = column_linear(x, self.weight, self.bias, self._group)
        return gather_last(own, self.cut, self._group) if self.gathers else own


class RowLinear(nn.Module):
    """A linear layer that sees some of its inputs; the ranks' results are summed, then the bias is added, once."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, group: Group) -> None:
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        total = sum_over_ranks(F.linear(x, self.weight), self._group)
        return total if self.bias is None else total + self.bias


class VocabularyEmbedding(nn.Module):
    """An embedding that knows some of the words: the others' rows come from the other ranks."""

    def __init__(self, weight: nn.Parameter, cut: Sequence[int], group: Group) -> None:
        super().__init__()
        self.weight = weight
        self._first = cut[group.rank]
        self._group = group

    def forward(self, tokens: Tensor) -> Tensor:
        place = tokens - self._first
        is_own = (place >= 0) & (place < len(self.weight))
        if len(self.weight):
            rows = F.embedding(place.clamp(0, len(self.weight) - 1), self.weight)
            rows = torch.where(is_own.unsqueeze(-1), rows, 0.0)
        else:
            rows = self.weight.sum() + self.weight.new_zeros(*tokens.shape, self.weight.shape[1])
        return sum_over_ranks(rows, self._group)
