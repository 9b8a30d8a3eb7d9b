"""Buffers averaged over ranks: float ones by samples, integer ones by their maximum.

BatchNorm's running statistics differ between ranks because each saw other samples. Means are averaged; variances
through E[x^2], because the variance of a mixture is not the mean of the variances. A buffer that changed nowhere (a
mask, a table of positions) keeps its very bits, and the payload has the same layout on every rank whatever changed.
"""

import torch
from torch import Tensor, nn

from uneven.comm.group import Group


class BufferAverage:
    """Call `run` at the events where all ranks meet; it remembers the buffers of the last one."""

    def __init__(self, model: nn.Module) -> None:
        self._floats = [(name, b) for name, b in model.named_buffers() if b.dtype.is_floating_point]
        self._integers = [
            b for _, b in model.named_buffers() if not b.dtype.is_floating_point and not b.dtype.is_complex
        ]
        self._means = _means_of_variances(dict(self._floats))
        self._last = [b.detach().clone() for _, b in self._floats]

    def run(self, group: Group, samples: int) -> None:
        """`samples` is this rank's weight: what it trained since the last time."""
        if group.size == 1 or not (self._floats or self._integers):
            return
        self._average(group, float(samples))
        if self._integers:
            together = torch.stack([b.detach().max().to("cpu", torch.int64) for b in self._integers])
            group.max_(together).wait()
            for buffer, value in zip(self._integers, together, strict=True):
                if buffer.numel() == 1:
                    buffer.fill_(value.to(buffer.dtype))
        self._last = [b.detach().clone() for _, b in self._floats]

    def _average(self, group: Group, weight: float) -> None:
        changed = [float(not torch.equal(b, old)) for (_, b), old in zip(self._floats, self._last, strict=True)]
        parts = [(self._moment(name, b) * weight).flatten().double() for name, b in self._floats]
        payload = torch.cat([*parts, torch.tensor([*changed, weight], dtype=torch.float64)]).cpu()
        group.sum_(payload).wait()
        total = payload[-1].item()
        if total == 0.0:
            return
        flags = payload[len(payload) - 1 - len(self._floats) : -1]
        averages = self._split(payload / total)
        for place, (name, buffer) in enumerate(self._floats):
            if flags[place] > 0:
                average = averages[name]
                if name in self._means:
                    average = (average - averages[self._means[name]] ** 2).clamp(min=0)
                buffer.copy_(average)

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
