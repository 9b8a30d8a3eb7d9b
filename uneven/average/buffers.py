"""Buffers averaged over ranks: float ones by samples, integer ones by their maximum.

BatchNorm's running statistics differ between ranks because each saw other samples. Means are averaged; variances
through E[x^2], because the variance of a mixture is not the mean of the variances. A buffer that changed nowhere (a
mask, a table of positions) keeps its very bits, and the payload has the same layout on every rank whatever changed.
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from uneven.comm.group import Group


class BufferAverage:
    """Call `run` at the events where all ranks meet; it remembers the buffers of the last one."""

    def __init__(self, model: nn.Module, equal: Collection[str] = ()) -> None:
        """`equal` names buffers that are the same on all ranks anyway; they are left alone."""
        named = [(name, b) for name, b in model.named_buffers() if name not in equal]
        self._floats = [(name, b) for name, b in named if b.dtype.is_floating_point]
        self._integers = [b for _, b in named if not b.dtype.is_floating_point and not b.dtype.is_complex]
        self._means = _means_of_variances(dict(self._floats))
        self._last = [b.detach().clone() for _, b in self._floats]
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
        changed = [float(not torch.equal(b, old)) for (_, b), old in zip(self._floats, self._last, strict=True)]
        # A rank that trained nothing sends zeros: its values may be anything, and 0 * nan is nan.
        moments = [self._moment(name, b) if weight else torch.zeros_like(b).double() for name, b in self._floats]
        parts = [(moment * weight).flatten() for moment in moments]
        return torch.cat([*parts, torch.tensor(changed, dtype=torch.float64)]).cpu()

    def unpack(self, payload: Tensor, total: float) -> None:
        """Overwrite the float buffers by the average in a sum of everybody's `pack`; `total` sums the weights."""
        if total:
            flags = payload[len(payload) - len(self._floats) :]
            averages = self._split(payload / total)
            for place, (name, buffer) in enumerate(self._floats):
                if flags[place] > 0:
                    average = averages[name]
                    if name in self._means:
                        average = (average - averages[self._means[name]] ** 2).clamp(min=0)
                    buffer.copy_(average)
        self._last = [b.detach().clone() for _, b in self._floats]

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

    def _moment(self, name: str, buffer: Tensor) -> Tensor:
        """What is averaged in a buffer's place: a variance stands for its second moment."""
        if name not in self._means:
            return buffer.double()
        mean = dict(self._floats)[self._means[name]]
        return buffer.double() + mean.double() ** 2

    def _split(self, payload: Tensor) -> dict[str, Tensor]:
        pieces, start = {}, 0
        for name, buffer in self._floats:
            pieces[name] = payload[start : start + buffer.numel()].view(buffer.shape)
            start += buffer.numel()
        return pieces


def _means_of_variances(buffers: dict[str, Tensor]) -> dict[str, str]:
    """running_var -> the running_mean beside it."""
    pairs = {}
    for name in buffers:
        stem, _, last = name.rpartition("running_var")
        if last == "" and name.endswith("running_var") and f"{stem}running_mean" in buffers:
            pairs[name] = f"{stem}running_mean"
    return pairs
