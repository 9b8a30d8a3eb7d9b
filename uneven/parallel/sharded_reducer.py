"""Gradients reduce-scattered to their owners: afterwards each rank holds the sums of its own shard only.

ShardedReducer does it in buckets while backward computes (zero2, fsdp); DeferredShardedReducer when the optimizer
steps (MuonAdamW). Both are gradient sources of a ShardedOptimizer.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from uneven.comm.collectives import reduce_scatter_shards
from uneven.comm.group import Group
from uneven.comm.work import Work, WorkList
from uneven.parallel.buckets import split_params
from uneven.parallel.flat_shards import FlatShards, Shard, flat_memory, gradient_like, ranks_held
from uneven.parallel.hooks import BackwardPass, GradientHooks, refuse_removed, refuse_repeated
from uneven.parallel.strategy import scale_all, scale_to_norm, square_of
from uneven.policy.redundancy import Copies

MAX_IN_FLIGHT = 2  # buckets on the wire at once; more would hold more full gradients


class Order(Protocol):
    """Other collectives of a backward, among which buckets have their places: see [Note: order of a step] in units.py.

    `started`: how many of them so far; `due`: of how many a bucket waits for the start.
    """

    started: int
    due: dict[FlatShards, int]

    @property
    def flags(self) -> list[float]:
        """What it has to tell the other ranks at the end of a backward."""
        ...

    def hear(self, flags: Sequence[float]) -> None:
        """The largest of all ranks' flags, when the backward is over."""
        ...

    def finish(self) -> None:
        """Start all that are left."""
        ...


@dataclass
class _ShardedBucket:
    """A range of a flat buffer, from `start` on, with the params that lie in it.

    Its memory exists only from the first gradient until this rank's part of the sum has been taken.
    """

    shards: FlatShards
    start: int
    params: list[nn.Parameter]
    buffer: Tensor | None = None
    works: WorkList | None = None
    pending: int = 0
    is_sent: bool = False
    late: int = 0  # how many of the other collectives had been started when a gradient came after the bucket was sent

    @property
    def stop(self) -> int:
        return self.start + sum(param.numel() for param in self.params)

    @property
    def bounds(self) -> list[int]:
        """The borders between the ranks' shards inside this bucket."""
        return [min(max(bound, self.start), self.stop) - self.start for bound in self.shards.bounds]

    def allocated(self) -> Tensor:
        if self.buffer is None:
            size, device = self.stop - self.start, self.shards.flat.device
            self.buffer = torch.zeros(size, dtype=self.shards.reduce_dtype, device=device)
        return self.buffer


def clip_shards(
    sums: Sequence[Tensor], group: Group, max_norm: float, device: torch.device, kept: Sequence[Tensor] = ()
) -> Tensor:
    """Scale this rank's sums by the norm over all ranks' shards; each element is counted once. Returns that norm.

    `kept` are scaled and not counted: sums that another rank owns.
    """
    square = torch.zeros(1, dtype=torch.float64, device=device)
    for own in sums:
        square += square_of(own).to(device)
    norm = group.all_reduce(square).wait().sqrt()[0]
    scale_to_norm([*sums, *kept], norm, max_norm)
    return norm


def gather_gradient(
    group: Group, param: nn.Parameter, shards: FlatShards, own: Iterable[tuple[Shard, Tensor | None]]
) -> Tensor:
    """A param's whole gradient from all ranks' shards of it."""
    full = torch.zeros_like(param, dtype=shards.reduce_dtype)
    for shard, grad in own:
        if shard.param is param and grad is not None:
            shard.of(full).copy_(grad)
    group.all_reduce(flat_memory(full)).wait()
    return full


class ShardedReducer:
    """Reduces every backward, also those that only accumulate, and adds it to the owner's shard.

    So full gradients live no longer than it takes to fill and send a bucket. Buckets are sent in one order on all
    ranks: see [Note: bucket order] in reducer.py. `gradient_of` returns this rank's sums.
    """

    def __init__(
        self,
        flat_shards: Sequence[FlatShards],
        group: Group,
        max_bytes: int,
        gradients_done: Callable[[FlatShards], None] = lambda _: None,  # called when backward is through with them
        copies: Copies | None = None,  # with it, the sums of a shard that this rank keeps for another one, too
    ) -> None:
        self._group = group
        self._ranks = ranks_held(group.rank, copies)
        self._has_copies = copies is not None
        self._gradients_done = gradients_done
        self._buckets = [bucket for shards in flat_shards for bucket in _make_buckets(shards, max_bytes)]
        self._bucket_of = {param: bucket for bucket in self._buckets for param in bucket.params}
        self._sums: dict[int, dict[FlatShards, Tensor]] = {}  # by owner, of what this rank holds; removed to zero them
        self._used: set[nn.Parameter] = set()  # by any rank since the sums were zeroed
        self._ready: set[nn.Parameter] = set()  # in this backward
        self._sent = 0
        self._order: Order | None = None
        self._pass = BackwardPass(self._end_of_backward)  # that is being reduced
        self._max_bytes = max_bytes
        self._hooks = [GradientHooks(self._bucket_of, self._before_gradient, self._gradient_ready)]

    def follow(self, order: Order) -> None:
        """Send buckets at their places among other collectives."""
        self._order = order

    def add(self, flat_shards: Sequence[FlatShards]) -> None:
        """More params, whose buckets are sent after the others'; those that were summed already have a new place."""
        buckets = [bucket for shards in flat_shards for bucket in _make_buckets(shards, self._max_bytes)]
        new = {param: bucket for bucket in buckets for param in bucket.params}
        unknown = [param for param in new if param not in self._bucket_of]
        self._buckets = [bucket for bucket in self._buckets if new.keys().isdisjoint(bucket.params)] + buckets
        self._bucket_of |= new
        self._hooks.append(GradientHooks(unknown, self._before_gradient, self._gradient_ready))

    def full_gradient(self, param: nn.Parameter) -> Tensor | None:
        """A whole summed gradient on every rank, None if no rank used the param. A collective."""
        if param not in self._used:
            return None
        shards = self._bucket_of[param].shards
        own = ((shard, self.gradient_of(shard)) for shard in shards.shards_of(self._group.rank))
        return gather_gradient(self._group, param, shards, own)

    def gradient_of(self, shard: Shard) -> Tensor | None:
        """The summed gradient of a shard that this rank holds; None if no rank used the param."""
        if shard.param not in self._used:
            return None
        shards = self._bucket_of[shard.param].shards
        begin = shards.starts[shard.param] + shard.start - shards.bounds[shard.rank]
        return self._sums[shard.rank][shards][begin : begin + shard.stop - shard.start]

    def scale(self, factor: Tensor) -> None:
        for sums in self._sums.values():
            scale_all(sums.values(), factor)

    def clip(self, max_norm: float) -> Tensor:
        own, kept = self._ranks[0], self._ranks[1:]
        sums = list(self._sums.get(own, {}).values())
        also = [one for rank in kept for one in self._sums.get(rank, {}).values()]
        return clip_shards(sums, self._group, max_norm, self._buckets[0].shards.flat.device, also)

    def start(self) -> None:
        """Nothing to do when the optimizer steps: backward has reduced everything."""

    def finish(self) -> None:
        """Sums stay until they are zeroed: the next backward may add to them."""

    def zero(self) -> None:
        self._sums.clear()
        self._used.clear()

    def backward_without_samples(self) -> None:
        self.reset()
        self._end_of_backward()

    def close(self) -> None:
        for hooks in self._hooks:
            hooks.remove()

    def begin_backward(self) -> None:
        """Called by the first gradient, or by a strategy that knows earlier that backward has begun."""
        if self._pass.enter():
            self.reset()

    def has_sent_before(self, number: int) -> bool:
        """Whether all buckets are sent that are due before this one of the other collectives."""
        return self._sent == len(self._buckets) or self._due(self._buckets[self._sent]) > number

    def send_before(self, number: int) -> None:
        """Send the buckets that are due before this one of the other collectives, ready or not."""
        while not self.has_sent_before(number):
            self._send_next()

    def send_ready(self) -> None:
        while self._sent < len(self._buckets) and self._may_send(self._buckets[self._sent]):
            self._send_next()

    def _may_send(self, bucket: _ShardedBucket) -> bool:
        return bucket.pending <= 0 and (self._order is None or self._due(bucket) <= self._order.started)

    def _due(self, bucket: _ShardedBucket) -> int:
        return 0 if self._order is None else self._order.due[bucket.shards]

    def _before_gradient(self, param: nn.Parameter) -> None:
        self.begin_backward()
        if param in self._ready:
            raise refuse_repeated()

    def reset(self) -> None:
        """Forget what a backward has left that failed."""
        self._ready.clear()
        self._sent = 0
        for bucket in self._buckets:
            bucket.pending = len(bucket.params)
            bucket.is_sent = False
            bucket.late = 0
            bucket.buffer = bucket.works = None

    def _gradient_ready(self, param: nn.Parameter) -> None:
        if param.grad is None:
            raise refuse_removed(param)
        bucket = self._bucket_of[param]
        if bucket.is_sent and self._order is not None:
            self._take_own_part(bucket)
            bucket.late = self._order.started
        start = bucket.shards.starts[param] - bucket.start
        bucket.allocated()[start : start + param.numel()] = flat_memory(gradient_like(param))
        param.grad = None
        self._ready.add(param)
        bucket.pending -= 1
        if bucket.pending == 0 and all(b.pending == 0 for b in self._buckets if b.shards is bucket.shards):
            self._gradients_done(bucket.shards)
        self.send_ready()

    def _send_next(self) -> None:
        if self._sent >= MAX_IN_FLIGHT:
            self._take_own_part(self._buckets[self._sent - MAX_IN_FLIGHT])
        self._send(self._buckets[self._sent])
        self._sent += 1

    def _send(self, bucket: _ShardedBucket) -> None:
        bucket.works = reduce_scatter_shards(self._group, bucket.allocated(), bucket.bounds, to_all=self._has_copies)
        bucket.is_sent = True

    def _take_own_part(self, bucket: _ShardedBucket) -> None:
        """Wait for a bucket, add what this rank holds of it to its sums, and free the rest."""
        if bucket.works is None:
            return
        bucket.works.wait()
        assert bucket.buffer is not None
        for rank in self._ranks:
            begin, end = bucket.shards.bounds_of(rank)
            first, last = max(begin, bucket.start), min(end, bucket.stop)
            if first < last:
                sums = self._sums.setdefault(rank, {})
                if bucket.shards not in sums:
                    sums[bucket.shards] = bucket.buffer.new_zeros(end - begin)
                sums[bucket.shards][first - begin : last - begin] += bucket.buffer[
                    first - bucket.start : last - bucket.start
                ]
        bucket.buffer = bucket.works = None

    def _end_of_backward(self) -> None:
        if self._order is not None:
            self._order.finish()
        while self._sent < len(self._buckets):
            self._send_next()
        for bucket in self._buckets:
            self._take_own_part(bucket)
        own = [float(param in self._ready) for param in self._bucket_of]
        if self._order is None:
            flags = self._group.all_reduce(torch.tensor(own).to(self._buckets[0].shards.flat.device)).wait()
            # A rank that used all params knows the result; reading the flags would make the host wait for the device.
            is_used = own if all(own) else flags.tolist()
        else:
            late = [float(bucket.late) for bucket in self._buckets]
            # On the host, which need not wait for the device.
            flags = torch.tensor([*own, *late, *self._order.flags], dtype=torch.float64)
            found = self._group.all_reduce_max(flags).wait().tolist()
            is_used = found[: len(own)]
            self._send_late(self._order, found[len(own) :][: len(late)])
            self._order.hear(found[len(own) + len(late) :])
        self._used.update(param for param, flag in zip(self._bucket_of, is_used, strict=False) if flag)
        self.reset()

    def _send_late(self, order: Order, late: Sequence[float]) -> None:
        """Sum the gradients that came after their bucket was sent, and let it be due later from now on."""
        due = 0
        for bucket, started in zip(self._buckets, late, strict=True):
            if started:
                self._send(bucket)
                self._take_own_part(bucket)
            due = max(due, order.due[bucket.shards], int(started))
            order.due[bucket.shards] = due


def _make_buckets(shards: FlatShards, max_bytes: int) -> list[_ShardedBucket]:
    """Params come from the last to the first, so a bucket's range starts with the last of its params."""
    return [
        _ShardedBucket(shards, shards.starts[params[-1]], params) for params in split_params(shards.params, max_bytes)
    ]


class DeferredShardedReducer:
    """Reduces what backward has accumulated in `.grad` when the optimizer steps: no hooks on backward.

    The sums exist from `start` to `finish`.
    """

    def __init__(self, flat_shards: Sequence[FlatShards], group: Group) -> None:
        self._flat_shards = list(flat_shards)
        self._group = group
        self._shards_of = {param: shards for shards in flat_shards for param in shards.params}
        self._sums: dict[FlatShards, tuple[Tensor, WorkList, Tensor, Work]] = {}
        self._used: dict[FlatShards, set[nn.Parameter]] = {}

    def add(self, flat_shards: Sequence[FlatShards]) -> None:
        """More params, whose sums follow the others'."""
        self._flat_shards += flat_shards
        self._shards_of |= {param: shards for shards in flat_shards for param in shards.params}

    @torch.no_grad()
    def start(self) -> None:
        """Start all sums; those that were started since the last `finish` or `zero` go on."""
        if self._sums:
            return
        self._used.clear()
        for shards in self._flat_shards:
            buffer = torch.zeros_like(shards.flat)
            for param, start in shards.starts.items():
                if param.grad is not None:
                    buffer[start : start + param.numel()] = flat_memory(gradient_like(param))
            flags = torch.tensor([float(param.grad is not None) for param in shards.params], device=buffer.device)
            works = reduce_scatter_shards(self._group, buffer, shards.bounds)
            self._sums[shards] = buffer, works, flags, self._group.all_reduce(flags)

    def gradient_of(self, shard: Shard) -> Tensor | None:
        """The summed gradient of this rank's shard of a param; None if no rank used the param."""
        shards = self._shards_of[shard.param]
        if shard.param not in self._used_of(shards):
            return None
        begin = shards.starts[shard.param]
        return self._sums[shards][0][begin + shard.start : begin + shard.stop]

    def own_sums(self) -> list[Tensor]:
        """All of this rank's sums, started by `start`, to be scaled in place."""
        for shards in self._sums:
            self._used_of(shards)
        return [buffer[slice(*shards.bounds_of(self._group.rank))] for shards, (buffer, *_) in self._sums.items()]

    def full_gradients(self, flat_shards: Sequence[FlatShards]) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        """Whole summed gradients on every rank, None if no rank used the param. A collective, after `start`."""
        for shards in flat_shards:
            used = self._used_of(shards)
            for param in shards.params:
                own = ((shard, self.gradient_of(shard)) for shard in shards.shards_of(self._group.rank))
                yield param, gather_gradient(self._group, param, shards, own) if param in used else None

    def finish(self) -> None:
        self._sums.clear()
        self._used.clear()

    def zero(self) -> None:
        """Forget sums that no step has used; the optimizer zeroes the params' own gradients."""
        self.finish()

    def _used_of(self, shards: FlatShards) -> set[nn.Parameter]:
        """The params that any rank has used; waits for the sums."""
        if shards not in self._used:
            _, works, flags, work = self._sums[shards]
            works.wait()
            work.wait()
            self._used[shards] = {p for p, flag in zip(shards.params, flags.tolist(), strict=True) if flag}
        return self._used[shards]
