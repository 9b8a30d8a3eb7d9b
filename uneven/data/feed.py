"""The feed: turns slots of the axis into batches on the rank's device, and never makes the step wait.

In-memory sets live on the device (or, when they do not fit, in host memory with pinned copies) and a batch is
one gather. Any other map-style set goes through torch's DataLoader. On CUDA the host fetches the next batch
while the device is still busy with the last one, because steps are only enqueued.

What a feed yields for a micro-batch is its *inputs*, a pytree of device tensors; `open(inputs)` makes the
batch. The two are apart so that a captured step can hold the gather and the augmentation too.
"""

import random
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, TensorDataset

from uneven.data.ledger import permutation, sample_keys
from uneven.data.tensors import Batch, TensorData
from uneven.policy.axis import Slot

RESIDENT_SHARE = 0.5  # of the free device memory a set may take; the rest is the model's

Inputs = Any
Micros = list[tuple[Inputs, int]]


class Feed(Protocol):
    """What the worker needs of a data set."""

    place: str  # where the samples live, for the printed configuration

    def stream(self, slots: Iterable[Slot]) -> Iterator[tuple[Slot, Micros]]:
        """Each slot with its micro-batches' inputs, in the order asked."""
        ...

    def open(self, inputs: Inputs) -> Batch: ...

    def in_order(self) -> Iterator[tuple[Batch, int]]:
        """Every sample once, unshuffled and not augmented: for evaluation."""
        ...


def make_feed(dataset: Any, device: torch.device, seed: int, batch_size: int, workers: int = 0) -> Feed:
    if isinstance(dataset, TensorDataset):
        dataset = TensorData(*dataset.tensors, transform=lambda rows, _: list(rows))
    if isinstance(dataset, TensorData):
        return TensorFeed(dataset, device, seed, batch_size)
    return LoaderFeed(dataset, device, seed, batch_size, workers)


class TensorFeed:
    """A TensorData on its device, or staged through pinned memory when it would crowd out the model."""

    def __init__(self, data: TensorData, device: torch.device, seed: int, batch_size: int) -> None:
        self._device = device
        self._seed = seed
        self._batch_size = batch_size
        self._resident = device.type != "cuda" or data.num_bytes <= RESIDENT_SHARE * _free_bytes(device)
        self._data = data.to(device) if self._resident else data.to(torch.device("cpu"))
        self.place = f"in {device.type} memory" if self._resident else "in host memory, copied batch by batch"
        self._epoch = -1
        self._picks = torch.empty(2, 0, dtype=torch.int64)

    def stream(self, slots: Iterable[Slot]) -> Iterator[tuple[Slot, Micros]]:
        for slot in slots:
            if slot.epoch != self._epoch:
                self._start_epoch(slot.epoch)
            picks = self._picks[:, slot.first : slot.stop]
            yield (
                slot,
                [(self._inputs(piece), piece.shape[1]) for piece in picks.split(self._batch_size, dim=1)],
            )

    def open(self, inputs: Inputs) -> Batch:
        if self._resident:
            return self._data.take(inputs[0], inputs[1])
        rows, keys = inputs
        return TensorData(*rows, transform=self._data.transform).take(
            torch.arange(len(keys), device=self._device), keys
        )

    def in_order(self) -> Iterator[tuple[Batch, int]]:
        home = self._device if self._resident else torch.device("cpu")
        for indices in torch.arange(len(self._data), device=home).split(self._batch_size):
            batch = self._data.take(indices, None)
            yield (batch if self._resident else _move(batch, self._device)), len(indices)

    def _start_epoch(self, epoch: int) -> None:
        order = permutation(self._seed, epoch, len(self._data))
        keys = sample_keys(self._seed, epoch, len(self._data))
        picks = torch.from_numpy(np.stack([order, keys]))
        self._picks = picks.to(self._device) if self._resident else picks
        self._epoch = epoch

    def _inputs(self, picks: Tensor) -> Inputs:
        if self._resident:
            return picks
        rows = tuple(t.index_select(0, picks[0]).pin_memory() for t in self._data.tensors)
        return _move((rows, picks[1].pin_memory()), self._device)


class LoaderFeed:
    """Any map-style data set, through torch's DataLoader in this process or in `workers` processes.

    Random augmentation inside the data set is keyed too: before a sample is read, the random generators of
    python, numpy and torch are seeded from (seed, epoch, position), so the sample comes out the same
    whichever rank or loader process reads it.
    """

    def __init__(self, dataset: Any, device: torch.device, seed: int, batch_size: int, workers: int) -> None:
        self._dataset = dataset
        self._device = device
        self._seed = seed
        self._batch_size = batch_size
        self._workers = workers
        self.place = f"read by {workers} loader processes" if workers else "read sample by sample"

    def stream(self, slots: Iterable[Slot]) -> Iterator[tuple[Slot, Micros]]:
        asked: deque[Slot] = deque()
        batches = iter(self._loader(self._keyed(slots, asked)))
        while (batch := self._next(batches)) is not None:
            slot = asked.popleft()
            sizes = _cut(slot.samples, self._batch_size)
            rest = [self._next(batches) for _ in sizes[1:]]
            yield slot, [(_move(b, self._device), n) for b, n in zip([batch, *rest], sizes, strict=True)]

    def open(self, inputs: Inputs) -> Batch:
        return inputs

    def in_order(self) -> Iterator[tuple[Batch, int]]:
        sizes = _cut(len(self._dataset), self._batch_size)
        starts = range(0, len(self._dataset), self._batch_size)
        plan = ([(start + i, None) for i in range(size)] for start, size in zip(starts, sizes, strict=True))
        batches = iter(self._loader(plan))
        for size in sizes:
            yield _move(self._next(batches), self._device), size

    def _next(self, batches: Iterator[Batch]) -> Batch | None:
        # Reading samples in this process must not disturb the training's own random numbers (dropout).
        with _random_state_kept() if self._workers == 0 else nullcontext():
            return next(batches, None)

    def _keyed(self, slots: Iterable[Slot], asked: deque[Slot]) -> Iterator[list[tuple[int, int]]]:
        epoch = -1
        for slot in slots:
            if slot.epoch != epoch:
                epoch = slot.epoch
                order = permutation(self._seed, epoch, len(self._dataset))
                keys = sample_keys(self._seed, epoch, len(self._dataset))
            asked.append(slot)
            picks = list(
                zip(
                    order[slot.first : slot.stop].tolist(), keys[slot.first : slot.stop].tolist(), strict=True
                )
            )
            for start in range(0, len(picks), self._batch_size):
                yield picks[start : start + self._batch_size]

    def _loader(self, plan: Iterable[list[Any]]) -> DataLoader[Any]:
        return DataLoader(
            _Keyed(self._dataset),
            batch_sampler=plan,
            num_workers=self._workers,
            generator=torch.Generator().manual_seed(self._seed),  # else it draws from the training's numbers
            pin_memory=self._device.type == "cuda",
            multiprocessing_context="fork" if self._workers else None,
        )


class _Keyed(Dataset[Any]):
    """Reads sample `index` with every random generator seeded by `key` (None: left alone)."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, pick: tuple[int, int | None]) -> Any:
        index, key = pick
        if key is not None:
            random.seed(key)
            np.random.seed(key & 0xFFFFFFFF)
            torch.default_generator.manual_seed(key)
        return self._dataset[index]


@contextmanager
def _random_state_kept() -> Iterator[None]:
    python, numpy, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_state)


def _cut(samples: int, batch_size: int) -> list[int]:
    """Sizes of the micro-batches of so many samples: full ones, then the rest."""
    full, rest = divmod(samples, batch_size)
    return [batch_size] * full + [rest] * (rest > 0)


def _move(tree: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.to(device, non_blocking=True), tree)


def _free_bytes(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return free
