"""The feed: turns slots of the axis into batches on the rank's device, and never makes the step wait.

In-memory sets live on the device (or, when they do not fit, in host memory with pinned copies) and a batch is
one gather. Any other map-style set goes through torch's DataLoader. On CUDA the host fetches the next batch
while the device is still busy with the last one, because steps are only enqueued.

What a feed yields for a micro-batch is its *inputs*, a pytree of device tensors; `open(inputs)` makes the
batch. The two are apart so that a captured step can hold the gather and the augmentation too.
"""

import pickle
import random
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any, Protocol

import cloudpickle
import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from uneven.data.ledger import permutation, sample_keys
from uneven.data.loader_context import LoaderContext, end_with_parent
from uneven.data.tensors import Batch, TensorData
from uneven.policy.axis import Part

RESIDENT_SHARE = 0.5  # of the free device memory a set may take; the rest is the model's

Inputs = Any
Micros = list[tuple[Inputs, int]]
_END = object()


class Feed(Protocol):
    """What the worker needs of a data set."""

    place: str  # where the samples live, for the printed configuration

    lookahead: int  # parts that may be asked for before the one just given has been trained

    def stream(self, parts: Iterable[Part]) -> Iterator[tuple[Part, Micros]]:
        """Each part with its micro-batches' inputs, in the order asked; a part may be empty."""
        ...

    def open(self, inputs: Inputs) -> Batch: ...

    def in_order(self, first: int = 0, stop: int | None = None) -> Iterator[tuple[Batch, int]]:
        """Every sample of the range once, unshuffled and not augmented: for evaluation."""
        ...


def make_feed(
    dataset: Any, device: torch.device, seed: int, batch_size: int, num_workers: int = 0, *, is_rank: bool = False
) -> Feed:
    """With `is_rank` the loader processes are not forked from this one."""
    if isinstance(dataset, TensorDataset):
        dataset = TensorData(*dataset.tensors, transform=lambda rows, _: list(rows))
    if isinstance(dataset, TensorData):
        return TensorFeed(dataset, device, seed, batch_size)
    return LoaderFeed(
        dataset, device, seed, batch_size, num_workers, LoaderContext() if num_workers and is_rank else None
    )


class TensorFeed:
    """A TensorData on its device, or staged through pinned memory when it would crowd out the model."""

    def __init__(self, data: TensorData, device: torch.device, seed: int, batch_size: int) -> None:
        self._device = device
        self._seed = seed
        self._batch_size = batch_size
        self._resident = device.type != "cuda" or data.num_bytes <= RESIDENT_SHARE * _free_bytes(device)
        self._data = data.to(device) if self._resident else data.to(torch.device("cpu"))
        self.place = f"in {device.type} memory" if self._resident else "in host memory, copied batch by batch"
        self.lookahead = 0
        self._epoch = -1
        self._picks = torch.empty(2, 0, dtype=torch.int64)

    def stream(self, parts: Iterable[Part]) -> Iterator[tuple[Part, Micros]]:
        for part in parts:
            if part.slot.epoch != self._epoch:
                self._start_epoch(part.slot.epoch)
            picks = self._picks[:, part.first : part.stop]
            pieces = picks.split(part.sizes, dim=1)
            yield part, [(self._inputs(piece), piece.shape[1]) for piece in pieces if piece.shape[1]]

    def open(self, inputs: Inputs) -> Batch:
        if self._resident:
            return self._data.take(inputs[0], inputs[1])
        rows, keys = inputs
        return TensorData(*rows, transform=self._data.transform).take(
            torch.arange(len(keys), device=self._device), keys
        )

    def in_order(self, first: int = 0, stop: int | None = None) -> Iterator[tuple[Batch, int]]:
        home = self._device if self._resident else torch.device("cpu")
        everything = torch.arange(len(self._data), device=home)[first:stop]
        for indices in everything.split(self._batch_size):
            if len(indices):
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
    """Any map-style data set, through torch's DataLoader in this process or in `num_workers` processes.

    Random augmentation inside the data set is keyed too: before a sample is read, the random generators of
    python, numpy and torch are seeded from (seed, epoch, position), so the sample comes out the same
    whichever rank or loader process reads it.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device,
        seed: int,
        batch_size: int,
        num_workers: int,
        start: LoaderContext | None = None,
    ) -> None:
        self._dataset = dataset
        self._start = start or ("fork" if num_workers else None)  # by fork a set needs no pickling and takes no memory
        self._device = device
        self._seed = seed
        self._batch_size = batch_size
        self._num_workers = num_workers
        self.place = f"read by {num_workers} loader processes" if num_workers else "read sample by sample"
        self.lookahead = 2 * num_workers  # a loader process has two batches waiting

    def stream(self, parts: Iterable[Part]) -> Iterator[tuple[Part, Micros]]:
        asked: deque[Part] = deque()
        batches = iter(self._loader(self._keyed(parts, asked)))
        while (batch := self._next(batches)) is not _END:
            part = asked.popleft()
            rest = [self._next(batches) for _ in part.sizes[1:]]
            moved = [_move(value, self._device) for value in (batch, *rest)]
            yield part, list(zip(moved, part.sizes, strict=False))  # an empty part has one batch, None

    def open(self, inputs: Inputs) -> Batch:
        return inputs

    def in_order(self, first: int = 0, stop: int | None = None) -> Iterator[tuple[Batch, int]]:
        indices = range(len(self._dataset))[first:stop]
        plan = [indices[start : start + self._batch_size] for start in range(0, len(indices), self._batch_size)]
        batches = iter(self._loader([(index, None) for index in indices] for indices in plan))
        for indices in plan:
            yield _move(self._next(batches), self._device), len(indices)

    def _next(self, batches: Iterator[Batch]) -> Batch:
        # Reading samples in this process must not disturb the training's own random numbers (dropout).
        with _random_state_kept() if self._num_workers == 0 else nullcontext():
            return next(batches, _END)

    def _keyed(self, parts: Iterable[Part], asked: deque[Part]) -> Iterator[list[tuple[int, int]]]:
        epoch = -1
        for part in parts:
            if part.slot.epoch != epoch:
                epoch = part.slot.epoch
                order = permutation(self._seed, epoch, len(self._dataset))
                keys = sample_keys(self._seed, epoch, len(self._dataset))
            asked.append(part)
            span = slice(part.first, part.stop)
            picks = iter(zip(order[span].tolist(), keys[span].tolist(), strict=True))
            # An empty part is read too, as nothing: so parts and batches keep step.
            for size in part.sizes or [0]:
                yield list(islice(picks, size))

    def _loader(self, plan: Iterable[list[Any]]) -> DataLoader[Any]:
        return DataLoader(
            _Keyed(self._dataset),
            batch_sampler=plan,
            collate_fn=_collate,
            num_workers=self._num_workers,
            generator=torch.Generator().manual_seed(self._seed),  # else it draws from the training's numbers
            pin_memory=self._device.type == "cuda",
            multiprocessing_context=self._start,
            worker_init_fn=end_with_parent if isinstance(self._start, LoaderContext) else None,
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

    def __reduce__(self) -> tuple[Any, ...]:
        # The set's class may live in the user's script, which a loader process does not read.
        return _unpack_keyed, (cloudpickle.dumps(self._dataset),)


def _unpack_keyed(packed: bytes) -> _Keyed:
    return _Keyed(pickle.loads(packed))


def _collate(samples: list[Any]) -> Any:
    return default_collate(samples) if samples else None


@contextmanager
def _random_state_kept() -> Iterator[None]:
    python, numpy, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_state)


def _move(tree: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.to(device, non_blocking=True), tree)


def _free_bytes(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return free
