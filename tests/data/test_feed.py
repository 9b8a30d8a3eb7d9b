import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset

from tests.faults import alive
from tests.forked import ForkedPopen, run_forked
from uneven.data.feed import make_feed
from uneven.data.tensors import TensorData
from uneven.policy.axis import Axis, Part, part_of

CPU = torch.device("cpu")


class Noisy(Dataset):
    """A data set that augments at random with all three generators, as users' sets do."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[int, float, float, torch.Tensor]:
        return index, random.random(), float(np.random.rand()), torch.rand(2)


LEFT = """
import sys
import torch
from uneven.data.feed import make_feed
from uneven.policy.axis import Axis, part_of

class Doubled:
    def __len__(self):
        return 60
    def __getitem__(self, index):
        return 2 * index

feed = make_feed(Doubled(), torch.device("cpu"), 0, 2, num_workers=2)
stream = feed.stream([part_of(slot, (slot.samples,), 0, 2) for slot in Axis(60, 2, 1).slots()])
next(stream)
print("begun", flush=True)
{end}
"""


UNGUARDED = """
print("begun", flush=True)
import torch
from uneven.data.feed import make_feed
from uneven.policy.axis import Axis, part_of

class Doubled:
    def __len__(self):
        return 6
    def __getitem__(self, index):
        return 2 * index

feed = make_feed(Doubled(), torch.device("cpu"), 0, 2, num_workers=2, is_rank=True)
parts = [part_of(slot, (slot.samples,), 0, 2) for slot in Axis(6, 2, 1).slots()]
print(str(sorted(int(i) for _, micros in feed.stream(parts) for batch, _ in micros for i in batch)).replace(" ", ""))
"""


READER = """
import os, torch
from uneven.data.feed import make_feed
from uneven.policy.axis import Axis, part_of

class Numbers:
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        return os.getpid()

feed = make_feed(Numbers(), torch.device("cpu"), 0, 2, num_workers=2, is_rank=True)
parts = (part_of(slot, (slot.samples,), 0, 2) for slot in Axis(4000, 2, 1).slots())
stream = feed.stream(parts)
seen = {int(pid) for _ in range(4) for batch, _ in next(stream)[1] for pid in batch}
print(*seen, flush=True)
while True:
    pass
"""


def read(dataset: object, axis: Axis, batch_size: int, num_workers: int = 0) -> list[list[object]]:
    feed = make_feed(dataset, CPU, seed=5, batch_size=batch_size, num_workers=num_workers)
    return [[feed.open(inputs) for inputs, _ in micros] for _, micros in feed.stream(whole(axis, batch_size))]


def whole(axis: Axis, batch_size: int) -> list[Part]:
    return [part_of(slot, (slot.samples,), 0, batch_size) for slot in axis.slots()]


@settings(max_examples=settings().max_examples // 2)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 4), st.integers(1, 3))
def test_every_feed_gives_every_sample_once_an_epoch_in_the_same_order(
    samples: int, batch_size: int, accumulate: int, epochs: int
) -> None:
    axis = Axis(samples, batch_size * accumulate, epochs)
    numbers = torch.arange(samples)
    resident = [int(i) for slot in read(TensorData(numbers), axis, batch_size) for b in slot for i in b]
    loaded = [int(i) for slot in read(numbers.tolist(), axis, batch_size) for b in slot for i in b]
    assert resident == loaded
    for epoch in range(epochs):
        assert sorted(resident[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


def test_micro_batches_carry_their_true_sizes() -> None:
    feed = make_feed(TensorData(torch.arange(10)), CPU, seed=0, batch_size=3)
    sizes = [[n for _, n in micros] for _, micros in feed.stream(whole(Axis(10, 6, 1), 3))]
    assert sizes == [[3, 3], [3, 1]]


def test_a_tensor_dataset_collates_as_torch_does() -> None:
    batch = read(TensorDataset(torch.arange(4), torch.arange(4) * 2), Axis(4, 4, 1), 4)[0][0]
    assert isinstance(batch, list)
    assert torch.equal(batch[0] * 2, batch[1])


class Shifted(TensorDataset):
    """As users write augmentation and normalisation."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        (row,) = super().__getitem__(index)
        return (row + 100,)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_tensor_dataset_with_its_own_getitem_is_read_by_it(num_workers: int) -> None:
    feed = make_feed(Shifted(torch.arange(6)), CPU, 0, 4, num_workers)
    seen = [int(i) for _, micros in feed.stream(whole(Axis(6, 4, 1), 4)) for (rows,), _ in micros for i in rows]
    assert sorted(seen) == [100, 101, 102, 103, 104, 105]
    assert [batch[0].tolist() for batch, _ in feed.in_order()] == [[100, 101, 102, 103], [104, 105]]


def test_augmentation_is_keyed_by_position_whatever_reads_it() -> None:
    one = read(Noisy(), Axis(23, 4, 2), 4)
    other_batches = read(Noisy(), Axis(23, 8, 2), 8)
    flat = [torch.cat([batch[part].flatten() for slot in one for batch in slot]) for part in range(4)]
    other = [torch.cat([batch[part].flatten() for slot in other_batches for batch in slot]) for part in range(4)]
    assert all(torch.equal(a, b) for a, b in zip(flat, other, strict=True))
    assert not torch.equal(flat[1][:23], flat[1][23:])  # the next epoch draws anew


def test_loader_processes_read_the_same_samples() -> None:
    here, there = read(Noisy(), Axis(23, 4, 1), 4), read(Noisy(), Axis(23, 4, 1), 4, num_workers=2)
    for slot_a, slot_b in zip(here, there, strict=True):
        for part_a, part_b in zip(slot_a[0], slot_b[0], strict=True):
            assert torch.equal(torch.as_tensor(part_a), torch.as_tensor(part_b))


def test_loader_processes_of_a_rank_do_not_run_the_script_again(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED)
    answer = run_forked([sys.executable, script])
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.split() == ["begun", "[0,2,4,6,8,10]"]


@pytest.mark.real_start
@pytest.mark.parametrize("end", ["raise KeyError(1)", "sys.exit(1)"])
def test_a_process_ends_although_its_loader_processes_read_ahead(end: str, tmp_path: Path) -> None:
    """They survive the one SIGTERM that multiprocessing sends before it waits for them."""
    script = tmp_path / "left.py"
    script.write_text(LEFT.format(end=end))
    answer = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=240, check=False)
    assert answer.returncode == 1, answer.stderr
    assert answer.stdout == "begun\n"
    assert "killed by signal" not in answer.stderr


def test_loader_processes_end_with_their_rank_even_if_it_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "reader.py"
    script.write_text(READER)
    with ForkedPopen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        loaders = {int(number) for number in rank.stdout.readline().split()}
        assert len(loaders) == 2
        assert rank.pid not in loaders
        rank.kill()
    end = time.monotonic() + 150
    while any(alive(pid) for pid in loaders):
        assert time.monotonic() < end, "left behind"
        time.sleep(0.05)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_reading_leaves_the_training_random_numbers_alone(num_workers: int) -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    read(Noisy(), Axis(23, 4, 1), 4, num_workers=num_workers)
    list(make_feed(Noisy(), CPU, seed=0, batch_size=4).in_order())
    assert torch.equal(torch.rand(3), expected)


def test_in_order_gives_every_sample_once_unshuffled() -> None:
    for dataset in (TensorData(torch.arange(10)), list(range(10))):
        batches = list(make_feed(dataset, CPU, seed=0, batch_size=4).in_order())
        assert [n for _, n in batches] == [4, 4, 2]
        assert torch.cat([b for b, _ in batches]).tolist() == list(range(10))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_ranks_with_any_shares_read_each_sample_once_empty_parts_included(num_workers: int) -> None:
    axis = Axis(23, 8, 2)
    shares = [(8, 0), (0, 8), (5, 3)]
    read_by_slot: dict[int, list[int]] = {slot.index: [] for slot in axis.slots()}
    for rank in (0, 1):
        feed = make_feed(list(range(23)), CPU, seed=5, batch_size=4, num_workers=num_workers)
        parts = []
        for slot in axis.slots():
            cut = shares[slot.index % 3] if slot.samples == 8 else (0, slot.samples)
            parts.append(part_of(slot, cut, rank, 4))
        for part, micros in feed.stream(parts):
            read_by_slot[part.slot.index] += [int(i) for batch, n in micros for i in feed.open(batch)[:n]]
    whole_run = [sorted(int(i) for b in slot for i in b) for slot in read(list(range(23)), axis, 8)]
    assert [sorted(found) for found in read_by_slot.values()] == whole_run


def test_in_order_may_be_a_range() -> None:
    for dataset in (TensorData(torch.arange(10)), list(range(10))):
        batches = list(make_feed(dataset, CPU, seed=0, batch_size=4).in_order(3, 9))
        assert torch.cat([b for b, _ in batches]).tolist() == [3, 4, 5, 6, 7, 8]
        assert list(make_feed(dataset, CPU, seed=0, batch_size=4).in_order(5, 5)) == []
