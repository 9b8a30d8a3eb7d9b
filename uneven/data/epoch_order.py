"""The order of an epoch: which sample stands at each position of the axis; the same on every rank.

`make_order` chooses it: a permutation by (seed, epoch), the data set's own order, or what a user's sampler draws. The
engine makes one per run, and its axis and its feed both read it. A sampler may draw fewer samples than the data set
has, or some of them twice: each draw is a position, and "exactly once" is about positions.
"""

import copy
import operator
import random
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, Sampler

from uneven.config import Loading, RunConfig, Task, is_stream
from uneven.data.sample_order import permutation, sample_keys
from uneven.data.source import ShardedOrder, StreamOrder, count_samples, shard_sizes
from uneven.errors import InputError
from uneven.policy.axis import Axis, BatchAxis
from uneven.policy.stream_axis import UNKNOWN, StreamAxis

_random_lock = threading.RLock()  # ranks may be threads of one process, and Python's generators are the process's


class EpochOrder(Protocol):
    """`samples` positions in every epoch."""

    samples: int

    def indices(self, epoch: int) -> NDArray[np.int64]:
        """The sample at each position of the epoch. Asked for in the order of epochs; the last two are kept."""
        ...

    def fingerprint(self, epochs: int) -> int:
        """Compared between the ranks before they train so many epochs; 0 where seed and settings say it all."""
        ...


class PlainOrder:
    """A permutation by (seed, epoch), or the data set's own order in every epoch."""

    def __init__(self, samples: int, seed: int, is_shuffled: bool) -> None:
        self.samples = samples
        self._seed, self._is_shuffled = seed, is_shuffled

    def indices(self, epoch: int) -> NDArray[np.int64]:
        return permutation(self._seed, epoch, self.samples) if self._is_shuffled else np.arange(self.samples)

    def fingerprint(self, epochs: int) -> int:
        del epochs
        return 0


class DrawnOrder:
    """What a user's sampler or batch sampler draws, epoch by epoch.

    Every rank draws by itself: the generators of Python, numpy and torch are seeded from (seed, epoch) first, and
    `set_epoch` is called where the sampler has it. A generator of the sampler's own goes on from epoch to epoch, as in
    a DataLoader. The user's sampler itself is left as it was.
    """

    def __init__(self, loading: Loading, num_indices: int, seed: int) -> None:
        """`num_indices` is the length of the data set."""
        self.is_batches = loading.batch_sampler is not None
        self._name = "batch_sampler" if self.is_batches else "sampler"
        self._loading = loading
        self._num_indices = num_indices
        self._seed = seed
        self._restart()
        self.samples = len(self.indices(0))
        self.batches = len(self.offsets(0)) - 1
        if not self.samples:
            raise InputError(f"{self._name} {self._kind} draws no sample: there is nothing to train on")

    def indices(self, epoch: int) -> NDArray[np.int64]:
        return self._epoch(epoch)[0]

    def offsets(self, epoch: int) -> list[int]:
        """Where each batch of a batch sampler begins, and the end of the last one."""
        return self._epoch(epoch)[1]

    def fingerprint(self, epochs: int) -> int:
        """Of the first epochs: a sampler that draws from the system's own randomness differs on every rank."""
        return zlib.crc32(b"".join(self.indices(epoch).tobytes() for epoch in range(min(2, epochs))))

    @property
    def _kind(self) -> str:
        return type(self._loading.batch_sampler if self.is_batches else self._loading.sampler).__name__

    def _restart(self) -> None:
        memo: dict[int, Any] = {}
        self._sampler = with_own_generators(
            self._loading.batch_sampler if self.is_batches else self._loading.sampler, memo
        )
        self._generator = with_own_generators(self._loading.generator, memo)
        self._drawn: dict[int, tuple[NDArray[np.int64], list[int]]] = {}
        self._next = 0

    def _epoch(self, epoch: int) -> tuple[NDArray[np.int64], list[int]]:
        if epoch < self._next and epoch not in self._drawn:
            self._restart()
        while self._next <= epoch:
            self._drawn[self._next] = self._draw(self._next)
            self._drawn.pop(self._next - 3, None)
            self._next += 1
        return self._drawn[epoch]

    def _draw(self, epoch: int) -> tuple[NDArray[np.int64], list[int]]:
        with random_states_preserved():
            seed_generators(int(sample_keys(self._seed, epoch, 1)[0]))
            for sampler in (self._sampler, getattr(self._sampler, "sampler", None)):
                if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                    set_epoch(epoch)
            # As a DataLoader does it: its BatchSampler asks a sampler for its iterator only with the first batch.
            iterator = iter(self._sampler) if self.is_batches else None
            if self._generator is not None:
                torch.empty((), dtype=torch.int64).random_(generator=self._generator)
            drawn = list(self._sampler if iterator is None else iterator)
        sizes = [len(batch) for batch in drawn] if self.is_batches else [len(drawn)]
        indices = self._checked([index for batch in drawn for index in batch] if self.is_batches else drawn)
        offsets = [0, *np.cumsum(sizes).tolist()]
        if epoch and (len(indices), len(offsets)) != (self.samples, self.batches + 1):
            now = f"{len(offsets) - 1} batches of {len(indices)} samples" if self.is_batches else f"{len(indices)}"
            was = f"{self.batches} of {self.samples}" if self.is_batches else f"{self.samples}"
            raise InputError(
                f"{self._name} {self._kind} drew {now} in epoch {epoch} and {was} in epoch 0; every epoch must have "
                "as many, because the steps of a run are counted beforehand"
            )
        if 0 in sizes and self.is_batches:
            raise InputError(f"batch_sampler {self._kind} gave an empty batch in epoch {epoch}")
        return indices, offsets

    def _checked(self, drawn: list[Any]) -> NDArray[np.int64]:
        try:
            indices = np.fromiter((operator.index(index) for index in drawn), dtype=np.int64, count=len(drawn))
        except TypeError as error:
            wrong = next(index for index in drawn if not hasattr(index, "__index__"))
            raise InputError(
                f"{self._name} {self._kind} gave {wrong!r}: positions of a data set are whole numbers"
            ) from error
        if len(indices) and not (indices.min() >= 0 and indices.max() < self._num_indices):
            worst = int(indices.min() if indices.min() < 0 else indices.max())
            raise InputError(
                f"{self._name} {self._kind} gave {worst}, and the data set has {self._num_indices} samples"
            )
        return indices


def make_order(task: Task, config: RunConfig) -> EpochOrder:
    """The order of the training set; InputError where a sampler cannot be followed."""
    if is_stream(task.dataset):
        sizes = shard_sizes(task.dataset)
        if sizes is None:
            return StreamOrder(count_samples(task.dataset), config.shuffle)
        return ShardedOrder(sizes, config.seed, config.shuffle)
    if task.loading.sampler is None and task.loading.batch_sampler is None:
        return PlainOrder(len(task.dataset), config.seed, config.shuffle)
    return DrawnOrder(task.loading, len(task.dataset), config.seed)


def make_axis(order: EpochOrder, config: RunConfig, ranks: int) -> Axis:
    """The slots of a run over this order; with `drop_last` the short slot at the end of an epoch is no part of it."""
    slot_size = config.slot_size(ranks)
    if order.samples == UNKNOWN:
        return StreamAxis(slot_size, config.epochs, config.max_steps)
    if isinstance(order, DrawnOrder) and order.is_batches:
        limit = config.max_steps
        return BatchAxis(order.samples, slot_size, config.epochs, order.batches, order.offsets, max_slots=limit)
    samples = order.samples - order.samples % slot_size if config.drop_last else order.samples
    if not samples:
        raise InputError(
            f"drop_last=True leaves nothing to train: an epoch has {order.samples} samples and a step {slot_size}; "
            "make batch_size smaller, or leave drop_last out"
        )
    return Axis(samples, slot_size, config.epochs, max_slots=config.max_steps)


def seed_generators(key: int) -> None:
    """Seed what a data set may draw from: Python, numpy, torch."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)


def random_states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_random_states(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@contextmanager
def random_states_preserved() -> Iterator[None]:
    """What is drawn inside does not change the random numbers of training (dropout)."""
    with _random_lock:
        before = random_states()
        try:
            yield
        finally:
            set_random_states(before)


_GENERATORS = torch.Generator | random.Random | np.random.Generator | np.random.RandomState


def with_own_generators(value: Any, memo: dict[int, Any]) -> Any:
    """A sampler or data set with generators of its own, so that drawing does not move the user's; those that are one
    stay one (`memo`)."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, torch.Generator):
        twin: Any = torch.Generator(device=value.device)
        twin.set_state(value.get_state())
    elif isinstance(value, _GENERATORS):
        twin = copy.deepcopy(value)
    elif hasattr(value, "__dict__") and (hasattr(value, "__iter__") or hasattr(value, "__getitem__")):
        twin = copy.copy(value)
        for name, part in vars(value).items():
            if isinstance(part, _GENERATORS | Sampler | Dataset):
                twin.__dict__[name] = with_own_generators(part, memo)
    else:
        twin = value
    memo[id(value)] = twin
    return twin
