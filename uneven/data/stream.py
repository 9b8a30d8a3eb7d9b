"""The feed of a stream that one reader reads for all ranks: a plain IterableDataset, or shards of unknown size.

The reader (reader.py) is a thread of rank 0, which reads ahead; with `num_workers=1` the data set is iterated in a
loader process of rank 0. One device alone iterates it between its steps, as a DataLoader without workers does. A
source whose shard sizes are known needs no reader: make_feed (feed.py) gives it to a LoaderFeed on every rank.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset

from uneven.comm.gather import gather_bytes
from uneven.comm.group import Group
from uneven.data.batches import Collate, pin, to_device
from uneven.data.epoch_order import random_states, seed_generators, set_random_states
from uneven.data.loader_process import Loaders
from uneven.data.pickling import MappedArrays, dumps, give_mapped, loads
from uneven.data.reader import Extent, LocalReader, Place, Reader, ReaderClient, ReaderServer, pack, unpack
from uneven.data.sample_order import sample_keys
from uneven.data.source import StreamSource, read_interleaved, start_epoch
from uneven.data.tensors import Batch
from uneven.errors import InputError
from uneven.policy.axis import Axis, Part
from uneven.policy.ledger import Ledger
from uneven.policy.stream_axis import StreamAxis

CHUNK = 32  # samples that a loader process sends at once
BATCHES_AHEAD = 8  # for every rank, that the reader keeps ready

Inputs = Any
Micros = list[tuple[Inputs, int]]


class ReaderFeed:
    """Life cycle: `connect` when a group has formed, then `stream`; after a loss the same again, with whoever is left.
    `close` when no rank needs a sample any more.

    Samples cannot be read beforehand to measure a step (Engine.can_warm_up), because nobody could put them back.
    """

    def __init__(
        self, dataset: Any, device: torch.device, batch_size: int, loaders: Loaders, *, is_shuffled: bool = True
    ) -> None:
        self._dataset = dataset
        self._device = device
        self._batch_size = batch_size
        self._loaders = loaders
        self._is_shuffled = is_shuffled
        self._collate = Collate(loaders.loading.collate_fn)
        self.place = "read in order by one loader process" if loaders.num_workers else "read in order by rank 0"
        self.lookahead = 2
        self._client: ReaderClient | LocalReader | None = None
        self._reader: Reader | None = None  # on rank 0
        self._is_threaded = loaders.num_workers > 0
        self._unanswered = 0  # ranges that were asked for and not received
        self._has_begun = False  # a stream: whoever begins another has left out the rest of its epoch
        self._close: list[Callable[[], None]] = []

    def connect(self, group: Group, axis: Axis, ledger: Ledger, *, is_shared: bool = False) -> None:
        """Start the reader on rank 0, and connect the others; a collective.

        The axis of a stream without length asks the reader for its end. `ledger`: what is trained, of a run that is
        resumed or has lost a rank: it is read once more and dropped. `is_shared`: all ranks train the same samples.
        """
        self.close()  # that of a group which is lost; what was read ahead or handed out in it is read again
        self._unanswered, self._has_begun = 0, False
        has_end = not isinstance(axis, StreamAxis)
        address = b""
        if group.rank == 0:
            reader = self._read(axis, ledger, group.world_size, group.world_size if is_shared else 1)
            if group.world_size > 1:
                connections = (group.world_size - 1) * (1 if has_end else 2)
                server = ReaderServer(reader, connections)
                self._close.append(server.close)
                address = server.address
            if isinstance(axis, StreamAxis):
                axis.connect(reader.ends_within)
        address = gather_bytes(group, address)[0]
        if group.rank > 0:
            self._client = ReaderClient(address)
            self._close.append(self._client.close)
            if isinstance(axis, StreamAxis):
                ends = ReaderClient(address)  # a second connection: answers to the first are on their way
                self._close.append(ends.close)
                axis.connect(lambda *question: _ask(ends, question))

    def _read(self, axis: Axis, ledger: Ledger, ranks: int, uses: int) -> Reader:
        """On rank 0: read from the beginning of the epoch that is in progress."""
        self._is_threaded |= ranks > 1  # a rank that is left alone goes on so
        is_threaded = self._is_threaded
        self.lookahead = 2 if is_threaded else 0

        def place(slot: int) -> Place:
            found = axis.slot(slot)
            return found.epoch, found.first

        start = place(ledger.first_untrained)
        extent = Extent(
            axis.epochs,
            None if isinstance(axis, StreamAxis) else axis.samples,
            start,
            [(place(first), place(stop)) for first, stop in ledger.trained_between],
            # Ranks may know the end of the epoch that is in progress, which is read again.
            axis.sizes[: start[0]] if isinstance(axis, StreamAxis) else [axis.samples] * start[0],
        )
        ahead = BATCHES_AHEAD * self._batch_size * ranks if is_threaded else 0
        around = OwnRandom().used
        reader = Reader(self._pass(is_threaded), extent, ahead=ahead, uses=uses, around=around, before=self._reader)
        self._reader = reader
        self._client = LocalReader(reader)
        self._close.append(reader.close)
        return reader

    def stream(self, parts: Iterable[Part]) -> Iterator[tuple[Part, Micros]]:
        """Ranges are asked for `lookahead` parts ahead, so that rank 0 reads and sends while this rank trains.

        Not beyond an epoch: where its rest is left out, a new stream begins with the next one, and nobody could give
        back what the old one has taken of that.
        """
        due: deque[Part] = deque()
        num_requested = 0  # parts of `due`, from its front on
        waiting = iter(parts)
        has_left_rest, self._has_begun = self._has_begun, True
        while True:
            due.extend(islice(waiting, self.lookahead + 1 - len(due)))
            if not due:
                return
            if has_left_rest:
                self._leave_out(due[0].slot.epoch)
                has_left_rest = False
            while num_requested < len(due) and due[num_requested].slot.epoch == due[0].slot.epoch:
                self._request(due[num_requested])
                num_requested += 1
            part = due.popleft()
            num_requested -= 1
            samples = iter(self._receive() if part.samples else ())
            yield part, [(self._batch(list(islice(samples, size))), size) for size in part.sizes]

    def _request(self, part: Part) -> None:
        if part.samples:
            assert self._client is not None, "connected when the group has formed"
            self._client.send("take", part.slot.epoch, part.first, part.stop)
            self._unanswered += 1

    def _receive(self) -> Any:
        assert self._client is not None, "connected when the group has formed"
        self._unanswered -= 1
        return self._client.receive()

    def _leave_out(self, epoch: int) -> None:
        """What lies before this epoch is trained by nobody; answers that the last stream has not taken are of that."""
        if self._reader is not None:
            self._reader.go_to(epoch)
        while self._unanswered:
            self._receive()

    def open(self, inputs: Inputs) -> Batch:
        return inputs

    def in_order(self, first: int = 0, stop: int | None = None) -> Iterator[tuple[Batch, int]]:
        del first, stop
        raise InputError(f"{type(self._dataset).__name__} is read by one reader and cannot be evaluated on")

    def close(self) -> None:
        while self._close:
            self._close.pop()()

    def _batch(self, samples: list[Any]) -> Batch:
        batch = self._collate.batch(samples)
        return to_device(pin(batch) if self._device.type == "cuda" else batch, self._device)

    def _pass(self, threaded: bool) -> Callable[[int], Iterator[Any]]:
        """Iterates over the samples of an epoch: here, or in a loader process."""
        stream = OnePass(self._dataset, self._loaders.seed, self._is_shuffled)
        if not self._loaders.num_workers:
            return stream.read if threaded else stream.read_seeded

        def read(epoch: int) -> Iterator[Any]:
            stream.epoch = epoch
            for chunk in self._loaders.open(stream, batch_size=None):
                yield from unpack(chunk)

        return read


class OnePass(IterableDataset[bytes]):
    """One epoch of a stream, sample by sample or, for a loader process, in pickled chunks.

    Python's, numpy's and torch's random generators are seeded by (seed, epoch) where the stream is read apart from the
    training: in a loader process, or with generator states of its own between the steps of one device. The thread of
    rank 0 shares the generators of its process and leaves them alone.
    """

    def __init__(self, dataset: Any, seed: int, is_shuffled: bool = True, epoch: int = 0) -> None:
        self.dataset = dataset
        self.seed = seed
        self.is_shuffled = is_shuffled
        self.epoch = epoch
        self._arrays = MappedArrays()  # a loader process shares large ones

    def read(self, epoch: int) -> Iterator[Any]:
        start_epoch(self.dataset, epoch)
        if isinstance(self.dataset, StreamSource):
            return read_interleaved(self.dataset, self.seed, epoch, self.is_shuffled)
        return iter(self.dataset)

    def read_seeded(self, epoch: int) -> Iterator[Any]:
        seed_generators(int(sample_keys(self.seed, epoch, 1)[0]))
        return self.read(epoch)

    def __iter__(self) -> Iterator[bytes]:
        """In the loader process."""
        samples = self.read_seeded(self.epoch)
        while chunk := list(islice(samples, CHUNK)):
            yield pack(chunk)

    def __reduce__(self) -> tuple[Any, ...]:
        # The data set's class may be one of the user's script, which a loader process does not import.
        return _one_pass, (dumps(self.dataset, self._arrays.take), self.seed, self.is_shuffled, self.epoch)


def _one_pass(dataset: bytes, seed: int, is_shuffled: bool, epoch: int) -> OnePass:
    return OnePass(loads(dataset, give_mapped), seed, is_shuffled, epoch)


class OwnRandom:
    """States of the random generators for the stream alone: what it draws does not move those of the training."""

    def __init__(self) -> None:
        self._states: tuple[Any, ...] | None = None

    @contextmanager
    def used(self) -> Iterator[None]:
        outside = random_states()
        set_random_states(self._states or outside)
        try:
            yield
        finally:
            self._states = random_states()
            set_random_states(outside)


def _ask(client: ReaderClient, question: tuple[int, ...]) -> int:
    client.send("ends_within", *question)
    return int(client.receive())
