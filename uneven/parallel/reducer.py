"""Gradients summed over ranks by backward itself: hooks on the params, buckets, and an end that nobody has to call.

Every gradient is a view of a flat bucket. A bucket whose gradients have all arrived leaves at once, in one fixed order
on every rank; when backward ends, the rest leaves, and backward returns with the sums. The last bucket carries a flag
per param: one that no rank used has no gradient afterwards, as in a single process.

Gradients that were summed before and not zeroed since (accumulation without `no_sync`) are counted once: each rank
takes its N-th part of them into the next sum.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from uneven.comm.group import Group
from uneven.parallel.bucket_sums import BucketSums
from uneven.parallel.hooks import GradientHooks, at_the_end_of_backward, running_backward


class Reducer:
    """`is_syncing` says whether the next backward sums over ranks; `close()` takes all hooks away."""

    def __init__(self, params: Iterable[nn.Parameter], group: Group, bucket_bytes: int, *, overlaps: bool) -> None:
        trained = [param for param in params if param.requires_grad]
        self._size = group.world_size
        self._sums = BucketSums(trained, group, bucket_bytes, extra=len(trained), overlaps=overlaps)
        self._summed: set[nn.Parameter] = set()  # whose gradients hold the sum of an earlier backward
        self._backward: int | None = None  # that is being summed; one that failed is taken up by none
        self.is_syncing = True
        self._hooks = GradientHooks(trained, self._take_part, self._arrived)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before = self.is_syncing
        self.is_syncing = False
        try:
            yield
        finally:
            self.is_syncing = before

    def sit_out(self) -> None:
        """What backward does on the other ranks, from a rank without samples."""
        if self.is_syncing:
            self._begin()
            self._finish()

    def close(self) -> None:
        self._hooks.remove()

    def _take_part(self, param: nn.Parameter) -> None:
        """Of a sum that is still there, this rank's part: the next sum adds them up again."""
        if param in self._summed:
            self._summed.remove(param)
            if param.grad is self._sums.views[param]:
                param.grad.div_(self._size)

    def _arrived(self, param: nn.Parameter) -> None:
        view = self._sums.views[param]
        if param.grad is not view:  # zeroed by dropping it, or somebody put another one there
            assert param.grad is not None
            view.copy_(param.grad)
            param.grad = view
        if not self.is_syncing:
            return
        if self._backward != running_backward():
            self._begin()
            at_the_end_of_backward(self._finish)
        self._sums.arrived(param)

    def _begin(self) -> None:
        self._backward = running_backward()
        self._sums.begin()

    def _finish(self) -> None:
        """Send what is left, wait for all, and give every param its sum."""
        for bucket in self._sums.waiting:
            for param, view in zip(bucket.params, bucket.views, strict=True):
                if param.grad is None:
                    view.zero_()
                self._take_part(param)
        flags, own = self._sums.extra, [float(param.grad is not None) for param in self._sums.views]
        flags.copy_(torch.tensor(own, dtype=flags.dtype))
        self._sums.finish()
        self._backward = None
        # Whoever used all params knows that they were used; to read what the others say would wait for the device.
        for (param, view), flag in zip(self._sums.views.items(), own if all(own) else flags.tolist(), strict=True):
            param.grad = view if flag else None
            if flag:
                self._summed.add(param)
