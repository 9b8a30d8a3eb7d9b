"""Gradients summed at their owners while backward computes: afterwards each rank holds those of its own piece only.

Full gradients live no longer than it takes to fill and send a bucket, so every backward sums, also those that only
accumulate: each adds to the owner's piece. Buckets are ranges of the flat buffers that the params lie in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from uneven.comm.collectives import reduce_pieces
from uneven.comm.group import Group
from uneven.comm.work import Works
from uneven.parallel.buckets import cut_buckets
from uneven.parallel.hooks import GradientHooks, at_the_end_of_backward, running_backward
from uneven.parallel.pieces import Pieces, Segment, flat_memory, lying_as
from uneven.parallel.strategy import scale_all, scale_to_norm

IN_FLIGHT = 2  # buckets that may be on the wire; more would hold more full gradients


@dataclass
class _Range:
    """A bucket: part of a flat buffer, from `start` on, with the params that lie in it."""

    pieces: Pieces
    start: int
    params: list[nn.Parameter]
    buffer: Tensor | None = None  # while gradients arrive and travel
    works: Works | None = None
    missing: int = 0

    @property
    def stop(self) -> int:
        return self.start + sum(param.numel() for param in self.params)

    @property
    def cut(self) -> list[int]:
        return [min(max(place, self.start), self.stop) - self.start for place in self.pieces.cut]

    def open(self) -> Tensor:
        if self.buffer is None:
            size, device = self.stop - self.start, self.pieces.flat.device
            self.buffer = torch.zeros(size, dtype=self.pieces.sum_dtype, device=device)
        return self.buffer


class OwnerReducer:
    """Sums what backward computes; `gradient_of` gives the sums of what this rank owns."""

    def __init__(
        self,
        pieces: Sequence[Pieces],
        group: Group,
        bucket_bytes: int,
        done: Callable[[Pieces], None] = lambda _: None,  # told when all gradients of some pieces have arrived
    ) -> None:
        self._group = group
        self._done = done
        self._ranges = [one for part in pieces for one in _cut_ranges(part, bucket_bytes)]
        self._home = {param: one for one in self._ranges for param in one.params}
        self._own: dict[Pieces, Tensor] = {}  # sums of this rank's pieces; dropped to zero them
        self._used: set[nn.Parameter] = set()  # by any rank since the sums were zeroed
        self._arrived_now: set[nn.Parameter] = set()
        self._sent = 0
        self._backward: int | None = None  # that is being summed; one that failed is taken up by none
        self._hooks = GradientHooks(self._home, self._before, self._arrived)

    def gradient_of(self, segment: Segment) -> Tensor | None:
        """The summed gradient of what this rank owns of a param; None if no rank used the param."""
        if segment.param not in self._used:
            return None
        pieces = self._home[segment.param].pieces
        begin = pieces.starts[segment.param] + segment.start - pieces.cut[self._group.rank]
        return self._own[pieces][begin : begin + segment.stop - segment.start]

    def scale(self, factor: Tensor) -> None:
        scale_all(self._own.values(), factor)

    def clip(self, max_norm: float) -> Tensor:
        """By the norm over all owners; each element is counted once."""
        device = self._ranges[0].pieces.flat.device
        square = torch.zeros(1, dtype=torch.float64, device=device)
        for own in self._own.values():
            square += own.double().square().sum()
        norm = self._group.all_reduce(square).wait().sqrt()[0]
        scale_to_norm(self._own.values(), norm, max_norm)
        return norm

    def start(self) -> None:
        """Backward has summed everything already."""

    def finish(self) -> None:
        """Sums stay until they are zeroed: the next backward may add to them."""

    def zero(self) -> None:
        self._own.clear()
        self._used.clear()

    def sit_out(self) -> None:
        """What backward does on the other ranks, from a rank without samples."""
        self._reset()
        self._finish()

    def close(self) -> None:
        self._hooks.remove()

    def _before(self, param: nn.Parameter) -> None:
        self.begin()
        if param in self._arrived_now:
            raise RuntimeError("a param had its gradient twice in one backward; checkpoint with use_reentrant=False")

    def begin(self) -> None:
        """Backward has begun; called by the first gradient, or by somebody who knows it before."""
        if self._backward != running_backward():
            self._backward = running_backward()
            self._reset()
            at_the_end_of_backward(self._finish)

    def _reset(self) -> None:
        self._arrived_now.clear()
        self._sent = 0
        for one in self._ranges:
            one.missing = len(one.params)
            one.buffer = one.works = None

    def _arrived(self, param: nn.Parameter) -> None:
        one = self._home[param]
        start = one.pieces.starts[param] - one.start
        one.open()[start : start + param.numel()] = flat_memory(lying_as(param))
        param.grad = None
        self._arrived_now.add(param)
        one.missing -= 1
        if one.missing == 0 and all(other.missing == 0 for other in self._ranges if other.pieces is one.pieces):
            self._done(one.pieces)
        while self._sent < len(self._ranges) and self._ranges[self._sent].missing <= 0:
            self._send()

    def _send(self) -> None:
        if self._sent >= IN_FLIGHT:
            self._land(self._ranges[self._sent - IN_FLIGHT])
        one = self._ranges[self._sent]
        one.works = reduce_pieces(self._group, one.open(), one.cut)
        self._sent += 1

    def _land(self, one: _Range) -> None:
        """Take this rank's part of a bucket that has been summed, and let the rest go."""
        if one.works is None:
            return
        one.works.wait()
        begin, end = self._bounds(one.pieces)
        first, last = max(begin, one.start), min(end, one.stop)
        if first < last:
            assert one.buffer is not None
            if one.pieces not in self._own:
                self._own[one.pieces] = torch.zeros(end - begin, dtype=one.buffer.dtype, device=one.buffer.device)
            self._own[one.pieces][first - begin : last - begin] += one.buffer[first - one.start : last - one.start]
        one.buffer = one.works = None

    def _bounds(self, pieces: Pieces) -> tuple[int, int]:
        return pieces.cut[self._group.rank], pieces.cut[self._group.rank + 1]

    def _finish(self) -> None:
        while self._sent < len(self._ranges):
            self._send()
        for one in self._ranges:
            self._land(one)
        own = [float(param in self._arrived_now) for param in self._home]
        flags = self._group.all_reduce(torch.tensor(own).to(self._ranges[0].pieces.flat.device)).wait()
        # Whoever used all params knows that they were used; to read what the others say would wait for the device.
        self._used.update(p for p, flag in zip(self._home, own if all(own) else flags.tolist(), strict=True) if flag)
        self._reset()
        self._backward = None


def _cut_ranges(pieces: Pieces, bucket_bytes: int) -> list[_Range]:
    """From the last param to the first, so a range begins with the last of its bucket."""
    return [_Range(pieces, pieces.starts[cut[-1]], cut) for cut in cut_buckets(pieces.params, bucket_bytes)]
