"""Streaming sources: which data sets are streams, how many samples they have, and the order of a source with shards.

A stream is a source that opens its shards at any sample, `open(shard, start)`, or an iterable data set that can only be
read from its beginning. make_feed (feed.py) reads a source whose shards have known sizes on every rank: position ->
(shard, start) is arithmetic, so each rank opens just the units (shard, start, count) that it trains. Everything else is
read once, by one reader for all ranks (reader.py). Invariant: no rank reads samples only to skip them. No torch here.
"""

import zlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from uneven.config import is_stream
from uneven.data.sample_order import permutation
from uneven.errors import InputError
from uneven.policy.stream_axis import UNKNOWN

UNIT = 32  # samples read in a row from one shard: one open() for so many, where another rank reads the next unit
CYCLE = 8  # shards that take turns, so at most so many are open at once
_SHARD_COUNTS = ("num_shards", "n_shards", "shards")


@runtime_checkable
class StreamSource(Protocol):
    """A source in shards, numbered from 0.

    It also has `num_shards`. With `shard_sizes`, the number of samples of each shard, every rank reads by itself; with
    `__len__` alone, or neither, one reader does. `set_epoch(epoch)`, where it exists, is called before each epoch.
    """

    def open(self, shard: int, start: int) -> Iterable[Any]:
        """The samples of a shard from number `start` on; it must not read those before it."""
        ...


@dataclass(frozen=True, slots=True)
class Unit:
    """`count` samples of a shard from `start` on, read in a row."""

    shard: int
    start: int
    count: int


def count_samples(dataset: Any) -> int | None:
    """The samples of one epoch; None for a stream without length."""
    if is_stream(dataset) and (sizes := shard_sizes(dataset)) is not None:
        return sum(sizes)
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def shard_sizes(source: Any) -> list[int] | None:
    """The samples of each shard; None where the source does not know them or has no shards."""
    if not isinstance(source, StreamSource):
        return None
    own = _value(source, "shard_sizes")
    shards = num_shards(source)
    if own is None:
        length = _length(source)
        return [length] if shards == 1 and length is not None else None
    sizes = [int(size) for size in own]
    name = type(source).__name__
    if len(sizes) != shards or min(sizes, default=-1) < 0:
        raise InputError(
            f"dataset {name} has shard_sizes={_short(sizes)} for {shards} shards; give one number of samples per shard"
        )
    length = _length(source)
    if length is not None and length != sum(sizes):
        raise InputError(
            f"dataset {name} has a len() of {length}, and its shard_sizes add up to {sum(sizes)}; make them agree"
        )
    return sizes


def num_shards(source: Any) -> int:
    """How many shards a source has: its `num_shards`, or the length of its `shards` or `shard_sizes`."""
    for name in (*_SHARD_COUNTS, "shard_sizes"):
        value = _value(source, name)
        if value is not None:
            count = int(value) if isinstance(value, int | np.integer) else len(value)
            if count < 1:
                raise InputError(f"dataset {type(source).__name__} has {name}={value!r}; a source has at least 1 shard")
            return count
    raise InputError(
        f"dataset {type(source).__name__} has open(shard, start) but not num_shards: add num_shards, "
        "and shard_sizes if they are known"
    )


def units(seed: int, epoch: int, sizes: Sequence[int]) -> Iterator[Unit]:
    """An epoch's units in order: CYCLE shards take turns, and one that has ended is replaced by the next.

    The order of the shards is drawn from (seed, epoch). Nothing depends on ranks or batches, so the order of the
    samples is the same on any devices.
    """
    left = iter(permutation(seed, epoch, len(sizes)).tolist())
    turns = [(shard, 0) for shard in islice(left, CYCLE)]
    while turns:
        following = []
        for shard, start in turns:
            count = min(UNIT, sizes[shard] - start)
            if count:
                yield Unit(shard, start, count)
            if start + count < sizes[shard]:
                following.append((shard, start + count))
            elif (successor := next(left, None)) is not None:
                following.append((successor, 0))
        turns = following


def read_interleaved(source: StreamSource, seed: int, epoch: int, is_shuffled: bool = True) -> Iterator[Any]:
    """All samples of a source whose shard sizes are not known: in the order of `units`, or shard after shard."""
    if not is_shuffled:
        yield from (sample for shard in range(num_shards(source)) for sample in source.open(shard, 0))
        return
    left = iter(permutation(seed, epoch, num_shards(source)).tolist())
    turns = [iter(source.open(shard, 0)) for shard in islice(left, CYCLE)]
    while turns:
        following = []
        for shard in turns:
            got = 0
            for sample in islice(shard, UNIT):
                got += 1
                yield sample
            if got == UNIT:
                following.append(shard)
            elif (successor := next(left, None)) is not None:
                following.append(iter(source.open(successor, 0)))
        turns = following


class ShardedOrder:
    """The order (epoch_order.py) of a source with known shard sizes: that of `units`, or one shard after the other."""

    def __init__(self, sizes: Sequence[int], seed: int, is_shuffled: bool = True) -> None:
        self.samples = sum(sizes)
        self._sizes = list(sizes)
        self._seed = seed
        self._is_shuffled = is_shuffled

    def indices(self, epoch: int) -> NDArray[np.int64]:
        """Of a ShardedDataset, at each position of the epoch."""
        if not self._is_shuffled:
            return np.arange(self.samples) + epoch * self.samples
        starts = [0, *accumulate(self._sizes)]
        found = [
            np.arange(unit.count) + starts[unit.shard] + unit.start for unit in units(self._seed, epoch, self._sizes)
        ]
        return np.concatenate(found).astype(np.int64, copy=False) + epoch * self.samples

    def fingerprint(self, epochs: int) -> int:
        del epochs
        return zlib.crc32(repr(self._sizes).encode())


class StreamOrder:
    """The order of a stream that one reader reads: as it comes. Without length, `samples` is UNKNOWN."""

    def __init__(self, samples: int | None, is_shuffled: bool) -> None:
        self.samples = UNKNOWN if samples is None else samples
        self.is_shuffled = is_shuffled  # the order of its shards, if it has any

    def indices(self, epoch: int) -> NDArray[np.int64]:
        raise AssertionError(f"samples of a stream have no numbers, asked for in epoch {epoch}")

    def fingerprint(self, epochs: int) -> int:
        del epochs
        return 0


class ShardedDataset:
    """A source with known shard sizes as a map-style data set, for the DataLoader of a LoaderFeed.

    Samples that are asked for in the order of a ShardedOrder are read on from an open shard; any other one opens its
    shard anew at that sample. An index counts the epoch, too: epoch * len + number of the sample.
    """

    def __init__(self, source: StreamSource) -> None:
        sizes = shard_sizes(source)
        assert sizes is not None, "make_feed gives a source without sizes to one reader"
        self._source, self._sizes = source, sizes
        self._starts = [0, *accumulate(sizes)][:-1]
        self._open: OrderedDict[int, tuple[Iterator[Any], int]] = OrderedDict()
        self._epoch = -1

    def __len__(self) -> int:
        return sum(self._sizes)

    def __getitem__(self, index: int) -> Any:
        epoch, number = divmod(int(index), len(self))
        if epoch != self._epoch:
            self._epoch = epoch
            self._open.clear()
            start_epoch(self._source, epoch)
        shard = bisect_right(self._starts, number) - 1
        start = number - self._starts[shard]
        samples, place = self._open.pop(shard, (iter(()), -1))
        if place != start:
            samples = iter(self._source.open(shard, start))
        try:
            sample = next(samples)
        except StopIteration:
            raise RuntimeError(
                f"shard {shard} of {type(self._source).__name__} ended at sample {start}, "
                f"and its shard_sizes says {self._sizes[shard]}"
            ) from None
        self._open[shard] = (samples, start + 1)
        if len(self._open) > CYCLE:
            self._open.popitem(last=False)
        return sample

    def __getstate__(self) -> dict[str, Any]:
        # Open shards stay in the process that opened them.
        return {**self.__dict__, "_open": OrderedDict(), "_epoch": -1}


def start_epoch(source: Any, epoch: int) -> None:
    """Tell a source which epoch is read next, as samplers and several libraries' streams want to know."""
    tell = getattr(source, "set_epoch", None)
    if callable(tell):
        tell(epoch)


def _value(source: Any, name: str) -> Any:
    value = getattr(source, name, None)
    return value() if callable(value) else value


def _length(source: Any) -> int | None:
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None


def _short(values: Sequence[int]) -> str:
    return repr(values if len(values) <= 6 else [*values[:6], ...]).replace("Ellipsis", "...")
