"""Layers of which every rank holds some columns, rows or words; they take the place of the dense ones."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uneven.comm.group import Group
from uneven.parallel.sequence_functions import SharedRows, gather_rows, sum_and_share_out
from uneven.parallel.tensor_functions import column_linear, gather_last, sum_over_ranks


class ColumnLinear(nn.Module):
    """Some of a linear layer's outputs, for inputs that all ranks have, or each some `rows` of.

    With `gathers` everybody gets all outputs.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        cut: Sequence[int],
        group: Group,
        *,
        gathers: bool,
        rows: SharedRows | None = None,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)
        self.cut, self._group, self.gathers, self._rows = list(cut), group, gathers, rows

    def forward(self, x: Tensor) -> Tensor:
        if self._rows is None:
            own = column_linear(x, self.weight, self.bias, self._group)
        else:  # the gather's backward sums the input's gradient
            own = F.linear(gather_rows(x, self._rows), self.weight, self.bias)
        return gather_last(own, self.cut, self._group) if self.gathers else own


class RowLinear(nn.Module):
    """A linear layer that sees some of its inputs; the ranks' results are summed, then the bias is added, once."""

    bias: nn.Parameter | None

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, group: Group, rows: SharedRows | None = None
    ) -> None:
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)
        self._group, self._rows = group, rows

    def forward(self, x: Tensor) -> Tensor:
        total = _summed(F.linear(x, self.weight), self._group, self._rows)
        return total if self.bias is None else total + self.bias


class VocabularyEmbedding(nn.Module):
    """An embedding that knows some of the words: the others' rows come from the other ranks."""

    def __init__(self, weight: nn.Parameter, cut: Sequence[int], group: Group, rows: SharedRows | None = None) -> None:
        super().__init__()
        self.weight = weight
        self._first = cut[group.rank]
        self._group, self._rows = group, rows

    def forward(self, tokens: Tensor) -> Tensor:
        place = tokens - self._first
        is_own = (place >= 0) & (place < len(self.weight))
        if len(self.weight):
            rows = F.embedding(place.clamp(0, len(self.weight) - 1), self.weight)
            rows = torch.where(is_own.unsqueeze(-1), rows, 0.0)
        else:
            rows = self.weight.sum() + self.weight.new_zeros(*tokens.shape, self.weight.shape[1])
        return _summed(rows, self._group, self._rows)


def keep_own_rows(module: nn.Module, rows: SharedRows) -> Any:
    """Of what the module makes for the whole sequence, such as a table of places, this rank keeps its rows."""

    def cut(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        rows.share_out(output.shape[-2])
        return output[..., rows.own, :]

    return module.register_forward_hook(cut)


def _summed(partial: Tensor, group: Group, rows: SharedRows | None) -> Tensor:
    return sum_over_ranks(partial, group) if rows is None else sum_and_share_out(partial, rows)
