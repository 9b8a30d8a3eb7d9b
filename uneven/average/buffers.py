"""Buffers averaged over ranks: float ones weighted by samples, integer ones by their maximum.

BatchNorm's running statistics differ between ranks because each saw other samples. Means are averaged; variances
through E[x^2], because the variance of a mixture is not the mean of the variances. A buffer that changed on no rank (a
mask, a table of positions) keeps its bits. The payload always has the same layout on every rank.

[Note: assigned buffers] Forward may write into a buffer, or assign another tensor to its name (`self.m = self.m / 2`).
Whoever holds buffers holds their first tensors, and has the values of assigned ones copied into them before it looks.
The other way round is wrong: what was assigned may be a batch or an activation, which nobody may overwrite.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress

import torch
from torch import Tensor, nn

from uneven.comm.group import Group
from uneven.comm.host_copy import copy_to_host_async


@dataclass(frozen=True)
class AveragedBuffers:
    """What a sum of all ranks' buffers has brought; it counts when `BufferAverage.load` is given it."""

    averages: list[Tensor | None]  # on the buffers' device; None for buffers that changed on no rank
    agreed: Tensor  # all float buffers on the host, with these averages


class HeldBuffers:
    """The buffers of a model as tensors that stay the same; see [Note: assigned buffers].

    `put_back` between a backward and the next forward: it writes into tensors that a graph may have saved.
    """

    def __init__(self, model: nn.Module) -> None:
        owners: list[tuple[str, dict[str, Tensor | None]]] = [(name, m._buffers) for name, m in model.named_modules()]
        self._places = [
            (f"{owner}.{key}".lstrip("."), buffers, key, tensor)
            for owner, buffers in owners
            for key, tensor in buffers.items()
            if tensor is not None
        ]

    @property
    def assigned(self) -> list[str]:
        """The names that hold other tensors by now; but for those of another shape, as of a cache that grows."""
        return [place[0] for place in self._places if _is_assigned(*place[1:])]

    def put_back(self) -> None:
        """Give every name its first tensor again, with the present values. A cache that has grown is left alone."""
        for _, buffers, key, tensor in self._places:
            if _is_assigned(buffers, key, tensor):
                with torch.no_grad():
                    tensor.copy_(buffers[key])  # type: ignore[arg-type]
                buffers[key] = tensor


def _is_assigned(buffers: dict[str, Tensor | None], key: str, tensor: Tensor) -> bool:
    value = buffers.get(key)
    return value is not tensor and value is not None and value.shape == tensor.shape


class BufferAverage:
    """`run` averages the buffers of all ranks, and remembers them to see next time which have changed.

    A BackgroundAverage calls its steps one by one: `snapshot_async` and later `load` in the training thread, `pack` and
    `unpack` in the averaging thread.
    """

    def __init__(self, model: nn.Module, equal: Collection[str] = ()) -> None:
        """`equal` names buffers that are the same on all ranks anyway; they are skipped."""
        self._held = HeldBuffers(model)
        named = [(name, b) for name, b in model.named_buffers() if name not in equal]
        floats = {name: b for name, b in named if b.dtype.is_floating_point}
        self._floats = list(floats.values())
        self._integers = [b for _, b in named if not b.dtype.is_floating_point and not b.dtype.is_complex]
        self._sizes = [b.numel() for b in self._floats]
        self._counts = torch.tensor(self._sizes, dtype=torch.int64)
        self._dtype = torch.cat([torch.zeros(0, dtype=b.dtype) for b in self._floats]).dtype if self._floats else None
        self._variances, self._means = _variances_and_means(floats)
        self._last = self.snapshot_async()()  # as they were when they were last averaged
        self._last_integers = [b.detach().clone() for b in self._integers]
        self._are_integers_known = True  # that those which look unchanged here are equal on all ranks
        self.averages = 0  # how many collectives of its own have changed the buffers here, in the lineage of this run

    def go_on_from(self, averages: int) -> None:
        """So often all ranks have averaged them, in the lineage of this run."""
        self.averages = averages

    @property
    def agreed(self) -> Tensor:
        """All float buffers as they were last averaged, the same on every rank that has merged the same rounds."""
        return self._last

    def run(self, group: Group, samples: float) -> None:
        """A collective. `samples` is this rank's weight: what it has trained since the last time.

        Everything is received before anything is changed: where a rank is lost, whoever is left has all of it or
        nothing, and `averages` tells which (train/settle.py).
        """
        if group.world_size == 1 or not (self._floats or self._integers):
            return
        weight = float(samples)
        payload = torch.cat([self.pack(self.snapshot_async()(), weight), torch.tensor([weight], dtype=torch.float64)])
        group.all_reduce(payload).wait()
        averaged = self.unpack(payload[:-1], payload[-1].item())
        largest = self._largest_integers(group)
        self.load(averaged)
        self._load_integers(largest)
        self.averages += 1

    def snapshot_async(self) -> Callable[[], Tensor]:
        """Copy the float buffers to one host tensor; the function returned waits for the copy."""
        self._held.put_back()
        if not self._floats:
            return lambda: torch.zeros(0, dtype=torch.float64)
        copied = copy_to_host_async(torch.cat([b.detach().flatten() for b in self._floats]))
        return lambda: copied().to(torch.float64, copy=True)

    def is_finite(self, flat: Tensor) -> bool:
        """Whether all values that have changed are finite; a mask may hold infinities from the beginning."""
        return bool((flat.isfinite() | (flat == self._last)).all())

    def pack(self, flat: Tensor, weight: float) -> Tensor:
        """This rank's part of the sum: its float buffers times its weight, and a flag for each that has changed."""
        changed = self._sum_per_buffer((flat != self._last).to(torch.float64)) > 0
        if weight:
            flat[self._variances] += flat[self._means] ** 2
            flat *= weight
        else:
            flat.zero_()  # not flat *= 0: 0 * nan is nan
        return torch.cat([flat, changed.to(torch.float64)])

    def unpack(self, payload: Tensor, total_weight: float) -> AveragedBuffers:
        """The averages in the sum of all ranks' `pack`. Changes nothing: the round may still fail."""
        if not total_weight or not self._floats:
            return AveragedBuffers([None] * len(self._floats), self._last)
        average, flags = payload.split([len(self._last), len(self._floats)])
        average = average / total_weight
        average[self._variances] = (average[self._variances] - average[self._means] ** 2).clamp(min=0)
        # One copy to the device, in the widest dtype that any of them needs.
        average = average.to(self._dtype)
        on_device = average.to(self._floats[0].device).split(self._sizes)
        is_changed = flags.repeat_interleave(self._counts) > 0
        agreed = torch.where(is_changed, self._rounded(average), self._last)
        unpacked = zip(self._floats, on_device, flags.tolist(), strict=True)
        return AveragedBuffers([part.to(b.dtype).view(b.shape) if flag else None for b, part, flag in unpacked], agreed)

    @torch.no_grad()
    def load(self, averaged: AveragedBuffers) -> None:
        """Overwrite the buffers that have changed on some rank."""
        self._held.put_back()
        averages = averaged.averages
        chosen = [average is not None for average in averages]
        if any(chosen):
            torch._foreach_copy_(list(compress(self._floats, chosen)), [a for a in averages if a is not None])
        self._last = averaged.agreed

    def take(self, agreed: Tensor) -> None:
        """Load another rank's `agreed`, of a round that this rank had entered and could not merge.

        As in the round itself, buffers that it did not change stay as they are here.
        """
        pairs = zip(self._floats, agreed.split(self._sizes), self._last.split(self._sizes), strict=True)
        averages = [None if torch.equal(new, old) else new.to(b.device, b.dtype).view(b.shape) for b, new, old in pairs]
        self.load(AveragedBuffers(averages, agreed))

    @property
    def agreed_integers(self) -> list[Tensor]:
        """All integer buffers as they were when ranks last took their maximum."""
        return self._last_integers

    @torch.no_grad()
    def take_integers(self, agreed: Sequence[Tensor]) -> None:
        """Load another rank's `agreed_integers`, of a maximum that this rank could not take."""
        self._held.put_back()
        for buffer, value in zip(self._integers, agreed, strict=True):
            buffer.copy_(value)
        self._last_integers = [b.detach().clone() for b in self._integers]

    def doubt_integers(self) -> None:
        """The ranks have changed while integers may have been on their way: next time all of them are sent."""
        self._are_integers_known = False

    def _sum_per_buffer(self, values: Tensor) -> Tensor:
        ends = torch.cat([torch.zeros(1, dtype=values.dtype), values.cumsum(0)])[
            torch.cat([torch.zeros(1, dtype=torch.int64), self._counts.cumsum(0)])
        ]
        return ends.diff()

    def _rounded(self, average: Tensor) -> Tensor:
        """Rounded as the buffers hold it, each in its own dtype."""
        if all(b.dtype == self._dtype for b in self._floats):
            return average.to(torch.float64)
        parts = zip(self._floats, average.split(self._sizes), strict=True)
        return torch.cat([part.to(b.dtype).to(torch.float64) for b, part in parts])

    def all_reduce_max_integers(self, group: Group) -> None:
        """Element by element, and only of buffers that have changed on some rank: a large mask is not sent."""
        if self._integers:
            self._load_integers(self._largest_integers(group))
            self.averages += 1

    def _largest_integers(self, group: Group) -> list[Tensor | None]:
        """The maxima over all ranks; None for buffers that have changed on no rank. Changes nothing."""
        if not self._integers:
            return []
        self._held.put_back()
        pairs = zip(self._integers, self._last_integers, strict=True)
        flags = torch.tensor([int(not (self._are_integers_known and torch.equal(b, old))) for b, old in pairs])
        group.all_reduce_max(flags).wait()
        changed = [b for b, flag in zip(self._integers, flags.tolist(), strict=True) if flag]
        if not changed:
            return [None] * len(self._integers)
        together = torch.cat([b.detach().flatten().to("cpu", torch.int64) for b in changed])
        group.all_reduce_max(together).wait()
        parts = iter(together.split([b.numel() for b in changed]))
        pairs = zip(self._integers, flags.tolist(), strict=True)
        return [next(parts).view(b.shape) if flag else None for b, flag in pairs]

    @torch.no_grad()
    def _load_integers(self, largest: Sequence[Tensor | None]) -> None:
        if all(part is None for part in largest):
            return  # and so nobody is in doubt
        for buffer, part in zip(self._integers, largest, strict=True):
            if part is not None:
                buffer.copy_(part)
        self._are_integers_known = True
        self._last_integers = [b.detach().clone() for b in self._integers]


def _variances_and_means(buffers: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The places of all running_var values in the flat buffers, and those of the running_mean values of each."""
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
