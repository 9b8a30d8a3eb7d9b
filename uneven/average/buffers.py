"""Buffers averaged over ranks: float ones by samples, integer ones by their maximum.

BatchNorm's running statistics differ between ranks because each saw other samples. Means are averaged; variances
through E[x^2], because the variance of a mixture is not the mean of the variances. A buffer that changed nowhere (a
mask, a table of positions) keeps its very bits, and the payload has the same layout on every rank whatever changed.
"""

from collections.abc import Collection
from itertools import accumulate

import torch
from torch import Tensor, nn

from uneven.comm.group import Group


class BufferAverage:
    """Call `run` at the events where all ranks meet; it remembers the buffers of the last one."""

    def __init__(self, model: nn.Module, equal: Collection[str] = ()) -> None:
        """`equal` names buffers that are the same on all ranks anyway; they are left alone."""
        named = [(name, b) for name, b in model.named_buffers() if name not in equal]
        floats = {name: b for name, b in named if b.dtype.is_floating_point}
        self._floats = list(floats.values())
        self._integers = [b for _, b in named if not b.dtype.is_floating_point and not b.dtype.is_complex]
        self._sizes = [b.numel() for b in self._floats]
        self._variances, self._means = _variances_and_means(floats)
        self._last = self._flat()  # as they were when they were last averaged
        self._last_integers = [b.detach().clone() for b in self._integers]

    def run(self, group: Group, samples: float) -> None:
        """All ranks meet here. `samples` is this rank's weight: what it trained since the last time."""
        if group.size == 1 or not (self._floats or self._integers):
            return
        weight = float(samples)
        payload = torch.cat([self.pack(weight), torch.tensor([weight], dtype=torch.float64)])
        group.sum_(payload).wait()
        self.unpack(payload[:-1], payload[-1].item())
        self.take_maximum(group)

    def pack(self, weight: float) -> Tensor:
        """This rank's part of the sum: its float buffers times its weight, and which of them changed."""
        flat = self._flat()
        changed = [bool(part.any()) for part in (flat != self._last).split(self._sizes)]
        if weight:
            flat[self._variances] += flat[self._means] ** 2
            flat *= weight
        else:
            flat.zero_()  # its values may be anything, and 0 * nan is nan
        return torch.cat([flat, torch.tensor(changed, dtype=torch.float64)])

    def unpack(self, payload: Tensor, total: float) -> None:
        """Overwrite the float buffers by the average in a sum of everybody's `pack`; `total` sums the weights."""
        if not total:
            return
        average, flags = payload.split([len(self._last), len(self._floats)])
        average = average / total
        average[self._variances] = (average[self._variances] - average[self._means] ** 2).clamp(min=0)
        parts = zip(
            self._floats, average.split(self._sizes), self._last.split(self._sizes), flags.tolist(), strict=True
        )
        for buffer, part, last, flag in parts:
            if flag:
                buffer.copy_(part.view(buffer.shape))
                # One that changed only after it was packed is left as it is, and the next average finds it changed.
                last.copy_(buffer.flatten())

    def take_maximum(self, group: Group) -> None:
        """Element by element, and only of those that changed somewhere: a large mask need not travel."""
        if not self._integers:
            return
        pairs = zip(self._integers, self._last_integers, strict=True)
        flags = torch.tensor([int(not torch.equal(b, old)) for b, old in pairs])
        group.max_(flags).wait()
        changed = [b for b, flag in zip(self._integers, flags.tolist(), strict=True) if flag]
        if not changed:
            return
        together = torch.cat([b.detach().flatten().to("cpu", torch.int64) for b in changed])
        group.max_(together).wait()
        for buffer, part in zip(changed, together.split([b.numel() for b in changed]), strict=True):
            buffer.copy_(part.view(buffer.shape))
        self._last_integers = [b.detach().clone() for b in self._integers]

    def _flat(self) -> Tensor:
        """The float buffers side by side, on the host."""
        together = torch.cat([b.detach().flatten() for b in self._floats]) if self._floats else torch.zeros(0)
        return together.to("cpu", torch.float64, copy=True)


def _variances_and_means(buffers: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Where in the flat buffers the numbers of each running_var stand, and those of the running_mean beside it."""
    ends = list(accumulate(b.numel() for b in buffers.values()))
    places = {name: range(end - b.numel(), end) for (name, b), end in zip(buffers.items(), ends, strict=True)}
    variances: list[int] = []
    means: list[int] = []
    for name, place in places.items():
        mean = f"{name.removesuffix('running_var')}running_mean"
        if name.endswith("running_var") and mean in places:
            variances += place
            means += places[mean]
    return torch.tensor(variances, dtype=torch.int64), torch.tensor(means, dtype=torch.int64)
