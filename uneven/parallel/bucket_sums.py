"""Buckets of gradients on their way: a full one leaves at once, and all ranks send them in one fixed order.

Whatever order gradients arrive in, bucket k leaves after bucket k - 1, so that the same sums meet on every rank. The
last one waits to be told: it carries numbers beside the gradients, which are known only at the end.
"""

from collections.abc import Sequence

import torch
from torch import nn

from uneven.comm.group import Group
from uneven.comm.work import Work
from uneven.parallel.buckets import Bucket, cut_buckets


class BucketSums:
    """Life cycle per sum: `begin()`, `arrived(param)` for each gradient that is there, `finish()`.

    `views` are the gradients' places in the buckets; `extra` are the numbers beside them, summed along.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], group: Group, bucket_bytes: int, extra: int, *, overlaps: bool
    ) -> None:
        self.overlaps = overlaps  # False: nothing is sent before finish()
        self._group = group
        self.buckets = _lay_buckets(params, extra, bucket_bytes)
        self.views = {p: view for one in self.buckets for p, view in zip(one.params, one.views, strict=True)}
        self.extra = self.buckets[-1].extra
        self._home = {param: bucket for bucket in self.buckets for param in bucket.params}
        self._works: list[Work] = []

    def begin(self) -> None:
        self._works = []
        for bucket in self.buckets:
            bucket.missing = len(bucket.params)

    @property
    def waiting(self) -> list[Bucket]:
        """Those that have not left."""
        return self.buckets[len(self._works) :]

    def arrived(self, param: nn.Parameter) -> None:
        self._home[param].missing -= 1
        while self.overlaps and len(self.waiting) > 1 and self.waiting[0].missing <= 0:
            self._send()

    def send_all_but_last(self) -> None:
        while len(self.waiting) > 1:
            self._send()

    def finish(self) -> None:
        """Send what is left, and wait until every bucket holds its sum."""
        while self.waiting:
            self._send()
        for work in self._works:
            work.wait()

    def _send(self) -> None:
        self._works.append(self._group.all_reduce(self.waiting[0].buffer))


def _lay_buckets(params: Sequence[nn.Parameter], extra: int, bucket_bytes: int) -> list[Bucket]:
    groups = cut_buckets(params, bucket_bytes)
    last = groups[-1]
    if last[0].dtype in (torch.float32, torch.float64):
        return [*map(Bucket, groups[:-1]), Bucket(last, extra)]
    # Halves would round the numbers: they travel by themselves.
    return [*map(Bucket, groups), Bucket([], extra, torch.float32, last[0].device)]
