"""Buffers averaged over ranks: float ones by samples, integer ones by their maximum.

BatchNorm's running statistics differ between ranks because each saw other samples. Means are averaged; variances
through E[x^2], because the variance of a mixture is not the mean of the variances. A buffer that changed nowhere (a
mask, a table of positions) keeps its very bits, and the payload has the same layout on every rank whatever changed.
"""

from collections.abc import Callable, Collection
from itertools import accumulate, compress

import torch
from torch import Tensor, nn

from uneven.comm.group import Group
from uneven.comm.host_copy import copy_to_host_async


class BufferAverage:
    """Call `run` at the events where all ranks meet; it remembers the buffers of the last one.

    Where an average travels in the background its steps are called one by one: `leave` by the thread that trains;
    `pack` and `bring` by the one that averages; `put` by the first again.
    """

    def __init__(self, model: nn.Module, equal: Collection[str] = ()) -> None:
        """`equal` names buffers that are the same on all ranks anyway; they are left alone."""
        named = [(name, b) for name, b in model.named_buffers() if name not in equal]
        floats = {name: b for name, b in named if b.dtype.is_floating_point}
        self._floats = list(floats.values())
        self._integers = [b for _, b in named if not b.dtype.is_floating_point and not b.dtype.is_complex]
        self._sizes = [b.numel() for b in self._floats]
        self._counts = torch.tensor(self._sizes, dtype=torch.int64)
        self._dtype = torch.cat([torch.zeros(0, dtype=b.dtype) for b in self._floats]).dtype if self._floats else None
        self._variances, self._means = _variances_and_means(floats)
        self._last = self.leave()()  # as they were when they were last averaged
        self._last_integers = [b.detach().clone() for b in self._integers]

    def run(self, group: Group, samples: float) -> None:
        """All ranks meet here. `samples` is this rank's weight: what it trained since the last time."""
        if group.world_size == 1 or not (self._floats or self._integers):
            return
        weight = float(samples)
        payload = torch.cat([self.pack(self.leave()(), weight), torch.tensor([weight], dtype=torch.float64)])
        group.all_reduce(payload).wait()
        self.put(self.bring(payload[:-1], payload[-1].item()))
        self.take_maximum(group)

    def leave(self) -> Callable[[], Tensor]:
        """The float buffers of this moment side by side; whoever calls the result waits until the host has them."""
        if not self._floats:
            return lambda: torch.zeros(0, dtype=torch.float64)
        landing = copy_to_host_async(torch.cat([b.detach().flatten() for b in self._floats]))
        return lambda: landing().to(torch.float64, copy=True)

    def is_finite(self, flat: Tensor) -> bool:
        """Whether none that changed is now infinite or no number; a mask may be, from the beginning."""
        return bool((flat.isfinite() | (flat == self._last)).all())

    def pack(self, flat: Tensor, weight: float) -> Tensor:
        """This rank's part of the sum: its float buffers times its weight, and which of them changed."""
        changed = self._of_each((flat != self._last).to(torch.float64)) > 0
        if weight:
            flat[self._variances] += flat[self._means] ** 2
            flat *= weight
        else:
            flat.zero_()  # its values may be anything, and 0 * nan is nan
        return torch.cat([flat, changed.to(torch.float64)])

    def bring(self, payload: Tensor, total: float) -> list[Tensor | None]:
        """The averages in a sum of everybody's `pack`, each beside its buffer; None where it changed nowhere.

        `total` sums the weights.
        """
        if not total or not self._floats:
            return [None] * len(self._floats)
        average, flags = payload.split([len(self._last), len(self._floats)])
        average = average / total
        average[self._variances] = (average[self._variances] - average[self._means] ** 2).clamp(min=0)
        # In one piece to the device, and in the widest type that any of them needs.
        average = average.to(self._dtype)
        here = average.to(self._floats[0].device).split(self._sizes)
        # One that changes from now on is left as it is, and the next average finds it changed.
        is_changed = flags.repeat_interleave(self._counts) > 0
        self._last[is_changed] = self._rounded(average)[is_changed]
        brought = zip(self._floats, here, flags.tolist(), strict=True)
        return [part.to(b.dtype).view(b.shape) if flag else None for b, part, flag in brought]

    @torch.no_grad()
    def put(self, averages: list[Tensor | None]) -> None:
        """Overwrite the buffers that changed somewhere."""
        chosen = [one is not None for one in averages]
        if any(chosen):
            torch._foreach_copy_(list(compress(self._floats, chosen)), [one for one in averages if one is not None])

    def _of_each(self, numbers: Tensor) -> Tensor:
        """The sum of each buffer's part of these."""
        ends = torch.cat([torch.zeros(1, dtype=numbers.dtype), numbers.cumsum(0)])[
            torch.cat([torch.zeros(1, dtype=torch.int64), self._counts.cumsum(0)])
        ]
        return ends.diff()

    def _rounded(self, average: Tensor) -> Tensor:
        """As the buffers hold it, each in its own type."""
        if all(b.dtype == self._dtype for b in self._floats):
            return average.to(torch.float64)
        parts = zip(self._floats, average.split(self._sizes), strict=True)
        return torch.cat([part.to(b.dtype).to(torch.float64) for b, part in parts])

    def take_maximum(self, group: Group) -> None:
        """Element by element, and only of those that changed somewhere: a large mask need not travel."""
        if not self._integers:
            return
        pairs = zip(self._integers, self._last_integers, strict=True)
        flags = torch.tensor([int(not torch.equal(b, old)) for b, old in pairs])
        group.all_reduce_max(flags).wait()
        changed = [b for b, flag in zip(self._integers, flags.tolist(), strict=True) if flag]
        if not changed:
            return
        together = torch.cat([b.detach().flatten().to("cpu", torch.int64) for b in changed])
        group.all_reduce_max(together).wait()
        for buffer, part in zip(changed, together.split([b.numel() for b in changed]), strict=True):
            buffer.copy_(part.view(buffer.shape))
        self._last_integers = [b.detach().clone() for b in self._integers]


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
