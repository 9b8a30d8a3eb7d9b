"""Feeds give a rank the batches of its parts, on its device. The engine makes one per data set with `make_feed`.

A TensorData or TensorDataset is kept on the device, where a batch is one gather; if it does not fit it stays in host
memory and batches are copied through pinned memory. Any other map-style data set is read by a torch DataLoader, and so
is a stream whose shards have known sizes (source.py); any other stream has one reader (stream.py). On CUDA the host
prepares the next batch while the device still computes the previous one, because steps are only enqueued.

A feed yields *inputs* for each micro-batch, a pytree of device tensors, and `open(inputs)` makes the batch from them.
They are separate so that a captured CUDA graph can contain the gather and the augmentation. A loop of the user's own
needs the batch before the step: there a LoadedFeed opens them at once.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from uneven.config import Loading, is_stream
from uneven.data.batches import Collate, to_device
from uneven.data.epoch_order import EpochOrder, PlainOrder, random_states_preserved
from uneven.data.loader_process import KeyedDataset, Loaders
from uneven.data.sample_order import sample_keys
from uneven.data.source import ShardedDataset, StreamOrder, shard_sizes
from uneven.data.stream import ReaderFeed
from uneven.data.tensors import Batch, TensorData, is_gathered
from uneven.policy.axis import Part

RESIDENT_FRACTION = 0.5  # of the free device memory that a data set may take; the rest is for the model

Inputs = Any
Micros = list[tuple[Inputs, int]]
_END = object()


class Feed(Protocol):
    """The samples of one data set as batches on one device, for training (`stream`) and evaluation (`in_order`)."""

    place: str  # where the samples are stored, for the printed configuration

    lookahead: int  # how many parts `stream` may request ahead of the part being trained

    def stream(self, parts: Iterable[Part]) -> Iterator[tuple[Part, Micros]]:
        """Each part with the inputs of its micro-batches, in the order of `parts`; a part may be empty."""
        ...

    def open(self, inputs: Inputs) -> Batch:
        """The batch of a micro-batch's inputs; may run inside a captured CUDA graph."""
        ...

    def in_order(self, first: int = 0, stop: int | None = None) -> Iterator[tuple[Batch, int]]:
        """(batch, number of samples) over the range, without shuffling or augmentation, for evaluation."""
        ...


def make_feed(
    dataset: Any,
    device: torch.device,
    seed: int,
    batch_size: int,
    num_workers: int = 0,
    *,
    is_rank: bool = False,
    loading: Loading = Loading(),  # noqa: B008, immutable
    order: EpochOrder | None = None,
) -> Feed:
    """The feed for `dataset`: the one place where the kind of source is chosen. Without `order` it is shuffled.

    In a rank process (`is_rank`) loader processes are not forked: see LoaderContext.
    """
    if is_stream(dataset):
        if shard_sizes(dataset) is None:
            is_shuffled = not isinstance(order, StreamOrder) or order.is_shuffled
            loaders = Loaders(min(num_workers, 1), loading, seed, is_rank=True)
            return ReaderFeed(dataset, device, batch_size, loaders, is_shuffled=is_shuffled)
        dataset = ShardedDataset(dataset)
    order = PlainOrder(len(dataset), seed, is_shuffled=True) if order is None else order
    if is_gathered(dataset) and loading.collate_fn is None:
        if isinstance(dataset, TensorDataset):
            dataset = TensorData.of(dataset.tensors, lambda rows, _: list(rows))
        return TensorFeed(dataset, device, seed, batch_size, order)
    return LoaderFeed(dataset, device, batch_size, order, Loaders(num_workers, loading, seed, is_rank))


class TensorFeed:
    """A TensorData that is resident on the device, or on the host if the model would have too little memory left."""

    def __init__(self, data: TensorData, device: torch.device, seed: int, batch_size: int, order: EpochOrder) -> None:
        self._device = device
        self._order = order
        self._seed = seed
        self._batch_size = batch_size
        self._resident = device.type != "cuda" or data.num_bytes <= RESIDENT_FRACTION * _free_bytes(device)
        self._data = data.to(device) if self._resident else data.to(torch.device("cpu"))
        self.place = f"in {device.type} memory" if self._resident else "in host memory, copied batch by batch"
        self.lookahead = 0
        self._epoch = -1
        self._picks = torch.empty(2, 0, dtype=torch.int64)

    def stream(self, parts: Iterable[Part]) -> Iterator[tuple[Part, Micros]]:
        for part in parts:
            if part.slot.epoch != self._epoch:
                self._start_epoch(part.slot.epoch)
            sizes = part.sizes
            picks = self._picks.narrow(1, part.first, part.samples)
            micros = picks.split(sizes, dim=1) if len(sizes) > 1 else (picks,)
            yield part, [(self._inputs(micro), size) for micro, size in zip(micros, sizes, strict=False)]

    def open(self, inputs: Inputs) -> Batch:
        if self._resident:
            return self._data.take(*inputs.unbind())
        rows, keys = inputs
        data = TensorData.of(rows, self._data.transform)
        return data.take(torch.arange(len(keys), device=self._device), keys)

    def in_order(self, first: int = 0, stop: int | None = None) -> Iterator[tuple[Batch, int]]:
        data_device = self._device if self._resident else torch.device("cpu")
        all_indices = torch.arange(len(self._data), device=data_device)[first:stop]
        for indices in all_indices.split(self._batch_size):
            if len(indices):
                batch = self._data.take(indices, None)
                yield (batch if self._resident else to_device(batch, self._device)), len(indices)

    def _start_epoch(self, epoch: int) -> None:
        order = self._order.indices(epoch)
        keys = sample_keys(self._seed, epoch, len(order))
        picks = torch.from_numpy(np.stack([order, keys]))
        self._picks = picks.to(self._device) if self._resident else picks
        self._epoch = epoch

    def _inputs(self, picks: Tensor) -> Inputs:
        if self._resident:
            return picks
        rows = tuple(t.index_select(0, picks[0]).pin_memory() for t in self._data.tensors)
        return to_device((rows, picks[1].pin_memory()), self._device)


class LoaderFeed:
    """Any map-style data set, read by a DataLoader in this process or in `num_workers` processes.

    Before a sample is read, the random generators of Python, numpy and torch are seeded from (seed, epoch, position).
    Random augmentation inside the data set is thus the same whichever rank or loader process reads the sample.
    """

    def __init__(
        self, dataset: Any, device: torch.device, batch_size: int, order: EpochOrder, loaders: Loaders
    ) -> None:
        self._dataset = KeyedDataset(dataset)
        self._num_samples = len(dataset)
        self._device = device
        self._batch_size = batch_size
        self._order = order
        self._loaders = loaders
        self._plan: list[list[Any]] = []  # of the evaluation that is on, for its DataLoader if that persists
        self._persistent: DataLoader[Any] | None = None
        num_workers = loaders.num_workers
        self.place = f"read by {num_workers} loader processes" if num_workers else "read sample by sample"
        self.lookahead = loaders.ahead

    def stream(self, parts: Iterable[Part]) -> Iterator[tuple[Part, Micros]]:
        requested: deque[Part] = deque()
        batches = iter(self._loader(self._sample_plan(parts, requested)))
        while (batch := self._next(batches)) is not _END:
            part = requested.popleft()
            rest = [self._next(batches) for _ in part.sizes[1:]]
            moved = [to_device(value, self._device) for value in (batch, *rest)]
            yield part, list(zip(moved, part.sizes, strict=False))  # an empty part has one batch: None

    def open(self, inputs: Inputs) -> Batch:
        return inputs

    def in_order(self, first: int = 0, stop: int | None = None) -> Iterator[tuple[Batch, int]]:
        indices = range(self._num_samples)[first:stop]
        plan = [indices[start : start + self._batch_size] for start in range(0, len(indices), self._batch_size)]
        batches = self._iterate([[(index, None) for index in indices] for indices in plan])
        for indices in plan:
            yield to_device(self._next(batches), self._device), len(indices)

    def _next(self, batches: Iterator[Any]) -> Any:
        # Seeding per sample in this process must not change the random numbers of training (dropout).
        with nullcontext() if self._loaders.num_workers else random_states_preserved():
            loaded: Any = next(batches, _END)
        return _END if loaded is _END else loaded.batch

    def _sample_plan(self, parts: Iterable[Part], requested: deque[Part]) -> Iterator[list[tuple[int, int]]]:
        """The (index, key) pairs of each batch, for the DataLoader; appends each part to `requested` as it is read."""
        epoch = -1
        for part in parts:
            if part.slot.epoch != epoch:
                epoch = part.slot.epoch
                order = self._order.indices(epoch)
                keys = sample_keys(self._loaders.seed, epoch, len(order))
            requested.append(part)
            span = slice(part.first, part.stop)
            picks = iter(zip(order[span].tolist(), keys[span].tolist(), strict=True))
            # An empty part yields one empty batch, so that every part has a batch to wait for.
            for size in part.sizes or [0]:
                yield list(islice(picks, size))

    def _iterate(self, plan: list[list[Any]]) -> Iterator[Any]:
        """Over the batches of an evaluation; with `persistent_workers` by the processes of the last one."""
        if not self._loaders.loading.persistent_workers or not self._loaders.num_workers:
            return iter(self._loader(plan))
        self._plan[:] = plan
        self._persistent = self._persistent or self._loader(self._plan, persistent_workers=True)
        return iter(self._persistent)

    def _loader(self, plan: Iterable[list[Any]], *, persistent_workers: bool = False) -> DataLoader[Any]:
        return self._loaders.open(
            self._dataset,
            batch_sampler=plan,
            collate_fn=Collate(self._loaders.loading.collate_fn),
            pin_memory=self._device.type == "cuda",
            persistent_workers=persistent_workers,
        )


class LoadedFeed:
    """Another feed, whose inputs are opened at once: `stream` yields batches."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self.place = feed.place
        self.lookahead = feed.lookahead

    def stream(self, parts: Iterable[Part]) -> Iterator[tuple[Part, Micros]]:
        for part, micros in self._feed.stream(parts):
            yield part, [(self._feed.open(inputs), samples) for inputs, samples in micros]

    def open(self, inputs: Inputs) -> Batch:
        return inputs

    def in_order(self, first: int = 0, stop: int | None = None) -> Iterator[tuple[Batch, int]]:
        return self._feed.in_order(first, stop)


def _free_bytes(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return free
