"""The gradient reducer: gradients summed over all ranks in flat buckets while backward is still computing.

DDPFlat, DDPBucketed and zero1 use it, and through them every exact step of `fit`; sequence parallelism uses it for
the params that are whole on every rank. Each gradient is a view of a bucket (as DDP's gradient_as_bucket_view), and
a bucket is sent as soon as its gradients are computed.

[Note: bucket order] Gradients may be computed in another order on each rank, but bucket k is always sent after
bucket k - 1: collectives must start in one order on all ranks, or they hang or mix up their data. A bucket that
backward never reached (an unused layer, a rank without samples) is sent as zeros when the reduction ends. The last
bucket is sent last of all: it carries one flag per param and the ranks' statistics, which are known only then. Where
the group sums small host tensors at almost no cost, these numbers have a bucket of their own on the host: then neither
they nor the decision what to do with the step wait for the device.

[Note: repeated gradients] A layer that several reentrant checkpoints use gets several gradients in one backward, see
[Note: backward inside backward] in hooks.py. Nothing leaves early in the first backward, which shows whether that is
so; where it is, nothing ever does. A param that repeats only later, after its bucket has left, is refused.

[Note: unused params] A param that no rank used must have no gradient after the sum, as in a single process: weight
decay and momentum would move it otherwise. The summed flags tell which params these are.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from uneven.comm.group import Group
from uneven.comm.host_copy import copy_to_host_async
from uneven.comm.work import Work
from uneven.parallel.buckets import Bucket, make_buckets
from uneven.parallel.hooks import BackwardPass, GradientHooks, refuse_removed, refuse_repeated


class Reducer:
    """Two ways to end a reduction:

    - Without `num_stats`, backward itself ends it, as in DistributedDataParallel: `loss.backward()` returns with the
      sums in `.grad`. Gradients that were summed before and not zeroed since are counted once.
    - With `num_stats`, the caller does: `prepare()`, backward of all micro-batches (all but the last one inside
      `no_sync()`), `finalize(stats)`. Each rank's row of `num_stats` numbers travels in the last bucket, so exchanging
      them costs no collective. Between the two calls nothing else may replace `.grad`.

    `overlap=False` sends nothing before the end. `close()` removes all hooks.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        group: Group,
        max_bytes: int,
        *,
        overlap: bool = True,
        num_stats: int | None = None,
    ) -> None:
        self.overlap = overlap
        self.require_sync = True  # False inside no_sync()
        self._params = [param for param in params if param.requires_grad]
        self._group = group
        self._max_bytes = max_bytes
        self._num_stats = num_stats or 0
        self._is_manual = num_stats is not None
        self._build_buckets()
        self._works: list[Work] = []
        self._is_prepared = False  # between prepare() and finalize()
        self._largest: list[Tensor] = []  # per bucket since prepare(), see `largest_gradient`
        self._num_checked = 0  # buckets that are in `_largest`
        self.is_dummy = False  # a backward without samples runs: the params that it reaches are not used
        self._summed: set[nn.Parameter] = set()  # params whose gradient is the sum of an earlier backward
        # Params by their place in the buckets: with a gradient since prepare(), without one on any rank in the last
        # sum, and with their gradient of the running backward.
        self._used: set[int] = set()
        self.unused: tuple[int, ...] = ()
        self._ready: set[int] = set()
        # [Note: repeated gradients]
        self._sends_early = False
        self._is_known = False  # one backward has shown whether gradients repeat
        self._has_repeated = False
        self._pass = BackwardPass(self._end_of_backward)  # where backward ends the reduction
        self._hooks = GradientHooks(
            self._params, None if self._is_manual else self._keep_own_part_of_sum, self._gradient_ready
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward only accumulates."""
        before = self.require_sync
        self.require_sync = False
        try:
            yield
        finally:
            self.require_sync = before

    def backward_without_samples(self) -> None:
        """Take part in the reduction in place of backward, on a rank that has no samples."""
        if self.require_sync:
            self._begin()
            self._end_of_backward()

    def follow_group(self) -> None:
        """Make new buckets if the world size has changed; before a step."""
        if len(self._extra) != self._extra_size:
            self._build_buckets()

    def prepare(self) -> None:
        """Zero all gradients and attach them to their buckets."""
        self.follow_group()
        self.unused = ()
        self._used.clear()
        self._largest.clear()
        self._num_checked = 0
        self._is_prepared = True
        self._begin()
        for bucket in self.buckets:
            bucket.buffer.zero_()
        self._attach()

    def has(self, param: nn.Parameter) -> bool:
        """Whether this param's gradients are summed."""
        return param in self._views

    @property
    def used(self) -> frozenset[int]:
        """The params that have had a gradient since `prepare`, by their place in the buckets."""
        return frozenset(self._used)

    def replayed(self, used: Iterable[int]) -> None:
        """In place of `prepare` and backward, where the replay of a CUDA graph held both and `largest_gradient`.

        `used` were the params with a gradient: a replay calls no hooks.
        """
        self.unused = ()
        self._used.clear()
        self._used.update(used)
        self._largest.clear()
        self._num_checked = len(self.buckets)
        self._is_prepared = True
        self._begin()
        self._attach()

    def largest_gradient(self) -> Tensor:
        """The largest absolute value of this rank's own gradient, NaN if any is NaN; after backward.

        Buckets that were sent were looked at before: in them the ranks' gradients are summed by now.
        """
        while self._num_checked < len(self.buckets):
            self._check_next()
        return torch.stack(self._largest).amax() if self._largest else torch.zeros((), dtype=torch.float64)

    def finalize(
        self, stats: Callable[[], Sequence[float]], device_stats: Callable[[], Tensor] | None = None
    ) -> list[list[float]]:
        """Send what is left and wait for the sums; returns every rank's statistics.

        `stats` is called as late as possible, just before the last bucket is sent. `device_stats` overwrites its last
        numbers by some that are on the device. If the last bucket is there, too, one copy goes to the device and one
        back.
        """
        while len(self._works) < self._last:
            self._send_next()
        num_stats, rank = self._num_stats, self._group.rank
        own = None if device_stats is None else device_stats()
        on_host = None if own is None or self._extra.is_cuda else copy_to_host_async(own)
        rows = [0.0] * (self._group.world_size * num_stats)
        if len(self._used) == len(self._views):
            flags = self._all_used
        else:
            flags = [float(place in self._used) for place in range(len(self._views))]
        rows[rank * num_stats : (rank + 1) * num_stats] = stats()  # waits for the device
        if own is not None and on_host is not None:
            rows[(rank + 1) * num_stats - len(own) : (rank + 1) * num_stats] = on_host().tolist()
        self._extra.copy_(torch.tensor([*rows, *flags], dtype=self._extra.dtype))
        if own is not None and on_host is None:
            self._extra[(rank + 1) * num_stats - len(own) : (rank + 1) * num_stats] = own
        self._send_and_wait()
        self._is_prepared = False
        numbers: list[float] = self._extra.tolist()
        summed = numbers[len(rows) :]
        if 0.0 in summed:
            self.unused = tuple(place for place, flag in enumerate(summed) if flag == 0.0)
            for param, flag in zip(self._views, summed, strict=True):
                if flag == 0.0:
                    param.grad = None
        return [numbers[start : start + num_stats] for start in range(0, len(rows), num_stats or 1)]

    def close(self) -> None:
        self._hooks.remove()

    @property
    def _extra_size(self) -> int:
        return self._group.world_size * self._num_stats + len(self._params)

    def _build_buckets(self) -> None:
        on_host = self._group.has_cheap_host_sums
        self.buckets = make_buckets(self._params, self._max_bytes, self._extra_size, extra_on_host=on_host)
        self._views = {p: view for bucket in self.buckets for p, view in zip(bucket.params, bucket.views, strict=True)}
        buckets = (bucket for bucket in self.buckets for _ in bucket.params)
        places = enumerate(zip(self._views.items(), buckets, strict=True))
        self._place_of = {param: (place, view, bucket) for place, ((param, view), bucket) in places}
        self._all_used = [1.0] * len(self._views)
        self._extra = self.buckets[-1].extra
        self._last = len(self.buckets) - 1

    def _keep_own_part_of_sum(self, param: nn.Parameter) -> None:
        """Divide a sum that is still in `.grad`, so that the next sum over ranks counts it once."""
        if param in self._summed:
            self._summed.remove(param)
            if param.grad is self._views[param]:
                param.grad.div_(self._group.world_size)

    def _gradient_ready(self, param: nn.Parameter) -> None:
        if self._is_manual and not self._is_prepared:
            return
        place, view, bucket = self._place_of[param]
        if param.grad is not view:  # zero_grad(set_to_none=True), or a user's own tensor
            if param.grad is None:
                raise refuse_removed(param)
            view.copy_(param.grad)
            param.grad = view
        if not self.is_dummy:
            self._used.add(place)
        if not self.require_sync:
            return
        if not self._is_manual and self._pass.enter():
            self._begin()
        if place in self._ready:
            self._note_repeated(param)
            return
        self._ready.add(place)
        bucket.pending -= 1
        while self._sends_early and len(self._works) < self._last and self.buckets[len(self._works)].pending <= 0:
            self._send_next()

    def _note_repeated(self, param: nn.Parameter) -> None:
        """[Note: repeated gradients]"""
        self._has_repeated, self._sends_early = True, False
        if any(bucket is self._place_of[param][2] for bucket in self.buckets[: len(self._works)]):
            raise refuse_repeated()

    def _begin(self) -> None:
        self._is_known |= bool(self._ready)
        self._sends_early = self.overlap and self._is_known and not self._has_repeated
        self._ready.clear()
        self._works = []
        for bucket in self.buckets:
            bucket.pending = len(bucket.params)

    def _end_of_backward(self) -> None:
        """Send what is left, wait for the sums, and attach them."""
        for bucket in self.buckets[len(self._works) :]:
            for param, view in zip(bucket.params, bucket.views, strict=True):
                if param.grad is None:
                    view.zero_()
                self._keep_own_part_of_sum(param)
        own = [float(param.grad is not None) for param in self._views]
        self._extra.copy_(torch.tensor(own, dtype=self._extra.dtype))
        self._send_and_wait()
        # A rank that used all params knows the result; reading the flags would make the host wait for the device.
        flags = own if all(own) else self._extra.tolist()
        for (param, view), flag in zip(self._views.items(), flags, strict=True):
            param.grad = view if flag else None
            if flag:
                self._summed.add(param)

    def _send_and_wait(self) -> None:
        while len(self._works) <= self._last:
            self._send_next()
        for work in self._works:
            work.wait()

    def _attach(self) -> None:
        for param, view in self._views.items():
            if param.grad is not view:  # to set it takes ten times as long
                param.grad = view

    def _send_next(self) -> None:
        bucket = self.buckets[len(self._works)]
        if self._is_manual and self._num_checked <= len(self._works) < len(self.buckets) - 1:
            self._check_next()
        self._works.append(self._group.all_reduce(bucket.buffer))

    def _check_next(self) -> None:
        self._largest += _largest_in(self.buckets[self._num_checked])
        self._num_checked += 1


def _largest_in(bucket: Bucket) -> list[Tensor]:
    """The largest absolute value of a bucket's gradients, as a double; [] where it has none."""
    gradients = bucket.buffer[: bucket.buffer.numel() - bucket.extra.numel()]
    if not gradients.numel():
        return []
    low, high = torch.aminmax(torch.view_as_real(gradients) if gradients.is_complex() else gradients)
    return [torch.maximum(-low, high).double()]
