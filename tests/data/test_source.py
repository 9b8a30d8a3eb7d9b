"""Sources: what is a stream, how long it is, and the order of its units."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from uneven.config import is_stream
from uneven.data.feed import make_feed
from uneven.data.source import (
    CYCLE,
    UNIT,
    ShardedDataset,
    ShardedOrder,
    count_samples,
    read_interleaved,
    shard_sizes,
    units,
)
from uneven.errors import InputError
from uneven.policy.axis import Axis, part_of

CPU = torch.device("cpu")


class Source:
    """Sample `n` of shard `s` is 1000 * s + n, plus a million in every further epoch."""

    def __init__(self, *sizes: int) -> None:
        self.shard_sizes = list(sizes)
        self.opened: list[tuple[int, int]] = []
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def open(self, shard: int, start: int) -> Iterator[int]:
        self.opened.append((shard, start))
        return iter(range(1_000_000 * self.epoch + 1000 * shard + start, 1_000_000 * self.epoch + 1000 * shard + 999))


@given(st.lists(st.integers(0, 150), min_size=1, max_size=20), st.integers(0, 9), st.integers(0, 3))
def test_units_cover_every_shard_once_and_in_order(sizes: list[int], seed: int, epoch: int) -> None:
    found = list(units(seed, epoch, sizes))
    for shard, size in enumerate(sizes):
        own = [unit for unit in found if unit.shard == shard]
        assert [unit.start for unit in own] == list(range(0, size, UNIT))
        assert sum(unit.count for unit in own) == size
    for place in range(len(found)):  # the shards that have begun and not ended
        begun = {unit.shard for unit in found[:place]} & {unit.shard for unit in found[place:]}
        assert len(begun) <= CYCLE


def test_the_order_of_the_shards_changes_with_seed_and_epoch() -> None:
    orders = [[unit.shard for unit in units(seed, epoch, [5] * 9)] for seed, epoch in ((0, 0), (0, 1), (1, 0), (0, 0))]
    assert orders[0] == orders[3]
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]


@given(st.lists(st.integers(0, 100), min_size=1, max_size=12), st.integers(0, 3))
def test_shards_of_unknown_size_come_in_the_same_order(sizes: list[int], epoch: int) -> None:
    class Ending:
        num_shards = len(sizes)

        def open(self, shard: int, start: int) -> Iterator[int]:
            return iter(range(1000 * shard + start, 1000 * shard + sizes[shard]))

    expected = [1000 * u.shard + u.start + i for u in units(4, epoch, sizes) for i in range(u.count)]
    # A shard whose size is a multiple of the unit is left one turn later: nobody knew that it had ended.
    if all(size % UNIT for size in sizes):
        assert list(read_interleaved(Ending(), 4, epoch)) == expected
    assert sorted(read_interleaved(Ending(), 4, epoch)) == sorted(expected)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_read_the_samples_of_their_parts_and_no_others(num_workers: int, ranks: int) -> None:
    sizes, axis = (70, 1, 40), Axis(111, 30, 2)
    got: dict[tuple[int, int], int] = {}
    for rank in range(ranks):
        source = Source(*sizes)
        order = ShardedOrder(sizes, 5)
        feed = make_feed(source, CPU, 5, batch_size=8, num_workers=num_workers if rank else 0, order=order)
        shares = [part_of(slot, _even(slot.samples, ranks), rank, 8) for slot in axis.slots()]
        for part, micros in feed.stream(shares):
            samples = [int(value) for inputs, _ in micros for value in feed.open(inputs)]
            got.update({(part.slot.epoch, part.first + place): sample for place, sample in enumerate(samples)})
    for epoch in range(2):
        expected = [
            1_000_000 * epoch + 1000 * u.shard + u.start + i for u in units(5, epoch, sizes) for i in range(u.count)
        ]
        assert [got[epoch, position] for position in range(111)] == expected


def _even(samples: int, ranks: int) -> list[int]:
    return [samples // ranks + (rank < samples % ranks) for rank in range(ranks)]


def test_a_shard_is_opened_once_where_it_is_read_on() -> None:
    source = Source(100, 100)
    dataset = ShardedDataset(source)
    assert len({dataset[int(index)] for index in ShardedOrder([100, 100], 0).indices(0)}) == 200
    assert sorted(source.opened) == [(0, 0), (1, 0)]
    in_order = ShardedOrder([100, 100], 0, is_shuffled=False).indices(1)
    assert [dataset[int(index)] for index in in_order] == [1_000_000 + 1000 * s + n for s in (0, 1) for n in range(100)]


def test_a_shard_shorter_than_it_says_is_an_error() -> None:
    dataset = ShardedDataset(Source(2000))
    with pytest.raises(RuntimeError, match="shard 0 of Source ended at sample 999, and its shard_sizes says 2000"):
        dataset[999]


class Iterable(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Countless:
    num_shards = 2

    def open(self, shard: int, start: int) -> Any: ...


class Sized(Countless):
    def __len__(self) -> int:
        return 7


class OneShard(Sized):
    num_shards = 1


class MapStyle(Sized):
    """Has shards and an `open` of its own, but is read by index."""

    def __getitem__(self, index: int) -> int:
        return index


class Derived(Sized, Dataset[int]):
    """torch's Dataset has a __getitem__, which only raises."""


@pytest.mark.parametrize(
    ("dataset", "is_one", "samples", "sizes"),
    [
        ([1, 2], False, 2, None),
        (TensorDataset(torch.zeros(3)), False, 3, None),
        (np.zeros(4), False, 4, None),
        (DataLoader([1]), False, 1, None),
        ({1, 2}, True, 2, None),
        (Iterable(), True, None, None),
        (Source(3, 4), True, 7, [3, 4]),
        (Countless(), True, None, None),
        (Sized(), True, 7, None),
        (OneShard(), True, 7, [7]),
        (MapStyle(), False, 7, None),
        (Derived(), True, 7, None),
    ],
)
def test_what_is_a_stream(dataset: Any, is_one: bool, samples: int | None, sizes: list[int] | None) -> None:
    assert is_stream(dataset) == is_one
    assert count_samples(dataset) == samples
    assert not is_one or shard_sizes(dataset) == sizes


def test_wrong_shards_are_refused() -> None:
    source: Any = Source(3, 4)
    source.num_shards = 3
    with pytest.raises(InputError, match=r"shard_sizes=\[3, 4\] for 3 shards"):
        shard_sizes(source)

    class NoCount:
        def open(self, shard: int, start: int) -> Any: ...

    with pytest.raises(InputError, match=r"has open\(shard, start\) but not num_shards"):
        count_samples(NoCount())

    class Longer(Source):
        def __len__(self) -> int:
            return 9

    with pytest.raises(InputError, match="a len\\(\\) of 9, and its shard_sizes add up to 7"):
        count_samples(Longer(3, 4))
