"""One body applied to every element, or slice, of a value."""

from typing import Any

import torch
from torch import Tensor, nn

from uneven.errors import InputError
from uneven.graph.rows import per_sample


class Map(nn.Module):
    """The body on each element along `dim` (stacked again), or on each of `slices` equal parts of it (joined again).

    `batched` folds the elements into the batch, so that the body runs once: the same for a body that treats samples
    one by one, and not for one that mixes them, as BatchNorm does. Extra inputs go to every element whole.
    """

    def __init__(self, body: nn.Module, dim: int, slices: int | None = None, batched: bool = False) -> None:
        super().__init__()
        self.body = body
        self.dim = dim
        self.slices = slices
        self.batched = batched

    def forward(self, x: Tensor, *extra: Any) -> Tensor:
        elements = self._elements(x)
        if self.batched:
            many, samples = len(elements), len(x)
            widened = [
                one.expand(many, *one.shape).flatten(0, 1) if per_sample(one, samples, "map") else one for one in extra
            ]
            results = self.body(torch.cat(elements), *widened).unflatten(0, (many, samples)).unbind(0)
        else:
            results = [self.body(one, *extra) for one in elements]
        dim = self.dim % x.dim()  # a body may change the number of dimensions, behind it
        return torch.stack(tuple(results), dim) if self.slices is None else torch.cat(tuple(results), dim)

    def _elements(self, x: Tensor) -> tuple[Tensor, ...]:
        if not -x.dim() <= self.dim < x.dim() or self.dim % x.dim() == 0:
            raise InputError(
                f"a map along dimension {self.dim} of a value of shape {tuple(x.shape)}: it must be one of "
                f"1 to {x.dim() - 1} (0 is the batch)"
            )
        if self.slices is None:
            return x.unbind(self.dim)
        if x.shape[self.dim] % self.slices:
            raise InputError(
                f"dimension {self.dim} has {x.shape[self.dim]} elements, which {self.slices} slices do not divide"
            )
        return x.chunk(self.slices, self.dim)

    def extra_repr(self) -> str:
        what = "each" if self.slices is None else f"{self.slices} slices"
        return f"{what} of dimension {self.dim}{', batched' if self.batched else ''}"
