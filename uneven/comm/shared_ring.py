"""Messages between ranks in a Segment: every rank writes into a ring of its own, the others read there.

Used by comm/exchange.py. A message is a range of its writer's ring with one or several readers. From every writer to
every reader there are two lanes, for values and for results, for values are sent ahead of results. Messages of a lane
arrive in the order in which they were sent. A lane has two semaphores: "there" counts messages that were sent, "free"
those that were read; and a table of where the messages lie. A range is written again only when all its readers have
freed it. Nothing here waits, except `Inbox.wait` and `Outbox.wait`.
"""

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from uneven.comm.lost import describe_wrong
from uneven.comm.segment import Segment
from uneven.comm.semaphores import BYTES as SEMAPHORE_BYTES
from uneven.comm.semaphores import Semaphore
from uneven.errors import GroupLostError, RankError

PAGE = 4096
ALIGN = 64  # of every message: a cache line, and what vector instructions like
ENTRIES = 256  # messages from one rank to another that may be unread at once
FIELDS = 4  # of a table's entry: start and length of the message, its checksum, its number
MAX_VIEWS = 4096  # tensors on the memory that are kept, for they take longer to make than a small message to send

Sleep = Callable[[Semaphore, int], None]  # until the semaphore was posted by that rank; raises if it is gone


@dataclass(frozen=True)
class Layout:
    """Where everything lies: a page of its own numbers for each rank, semaphores, tables, rings."""

    world_size: int
    ring_bytes: int
    ranks: tuple[int, ...] = ()  # their numbers in messages, where they are some of the ranks of a run

    def name(self, rank: int) -> int:
        return self.ranks[rank] if self.ranks else rank

    @property
    def size(self) -> int:
        return self.ring(self.world_size)

    def state(self, rank: int) -> int:
        """The numbers that a rank tells about itself (Peers in exchange.py); before them lies the token."""
        return PAGE * (1 + rank)

    def lane(self, rank: int, is_result: bool) -> int:
        """The number of a lane to or from that rank: first those of values, then those of results."""
        return rank + self.world_size * is_result

    @property
    def lanes(self) -> range:
        return range(2 * self.world_size)

    def semaphore(self, writer: int, reader: int, is_result: bool, is_free: bool) -> int:
        lane = writer * len(self.lanes) + self.lane(reader, is_result)
        return PAGE * (1 + self.world_size) + (2 * lane + is_free) * SEMAPHORE_BYTES

    def table(self, writer: int, reader: int, is_result: bool) -> int:
        first = _pages(self.semaphore(self.world_size, 0, False, False))
        return first + (writer * len(self.lanes) + self.lane(reader, is_result)) * ENTRIES * FIELDS * 8

    def ring(self, rank: int) -> int:
        return _pages(self.table(self.world_size, 0, False)) + rank * self.ring_bytes


def _pages(offset: int) -> int:
    return -(-offset // PAGE) * PAGE


def create_semaphores(segment: Segment, layout: Layout) -> None:
    """Called by rank 0 before the other ranks use the segment."""
    address, ranks = segment.address, range(layout.world_size)
    for writer, reader, is_result, is_free in product(ranks, ranks, (False, True), (False, True)):
        Semaphore(address + layout.semaphore(writer, reader, is_result, is_free)).create()


def _lanes(layout: Layout) -> Iterator[tuple[bool, int]]:
    """In the order of their numbers: whether they are for results, and the other rank."""
    return product((False, True), range(layout.world_size))


def _checksum(tensor: Tensor) -> int:
    """Of the bits of a contiguous tensor, and of their order."""
    return zlib.crc32(tensor.cpu().view(torch.uint8).numpy().data)


class Views:
    """Typed tensors on ranges of the segment."""

    def __init__(self, segment: Segment) -> None:
        self._whole = segment.bytes(0, segment.size)
        self._typed: dict[torch.dtype, Tensor] = {}
        self._views: dict[tuple[torch.dtype, int, int], Tensor] = {}

    def get(self, dtype: torch.dtype, start: int, count: int) -> Tensor:
        """`count` elements from byte `start` on."""
        key = (dtype, start, count)
        if (view := self._views.get(key)) is None:
            if (typed := self._typed.get(dtype)) is None:
                typed = self._typed[dtype] = self._whole.view(dtype)
            first = start // dtype.itemsize
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            view = self._views[key] = typed[first : first + count]
        return view

    def clear(self) -> None:
        self._typed.clear()
        self._views.clear()
        self._whole = torch.empty(0, dtype=torch.uint8)


@dataclass
class _Sent:
    """A range of the ring; it is free when each lane has been freed of as many messages as it had with this one."""

    end: int
    numbers: tuple[tuple[int, int], ...]  # the lanes, and the number of this message in each


@dataclass
class _Unposted:
    """A message whose bytes are still being copied from the device."""

    copied: torch.cuda.Event | None
    numbers: tuple[tuple[int, int], ...]
    start: int
    length: int
    checksum: int


class Outbox:
    """The ring of this rank. `send` copies a tensor into it and posts it in lanes to its readers.

    A CUDA tensor is copied by its stream: its message, and all later ones, are posted by `post` once the copy is done.
    """

    def __init__(self, segment: Segment, layout: Layout, rank: int, views: Views, verify: bool) -> None:
        address, to = segment.address, [(rank, reader, is_result) for is_result, reader in _lanes(layout)]
        self._there = [Semaphore(address + layout.semaphore(*lane, False)) for lane in to]
        self._free = [Semaphore(address + layout.semaphore(*lane, True)) for lane in to]
        self._tables = [segment.numbers(layout.table(*lane), ENTRIES * FIELDS) for lane in to]
        self._world_size = layout.world_size
        self._first, self._ring_bytes = layout.ring(rank), layout.ring_bytes
        self._views, self._verify = views, verify
        self._sent_to, self._freed_by = [0] * len(to), [0] * len(to)
        self._head = self._tail = 0  # bytes written and freed since the beginning
        self._sent: deque[_Sent] = deque()
        self._unposted: deque[_Unposted] = deque()
        self._blocking = 0  # the lane that had no room

    def send(self, tensor: Tensor, lanes: Sequence[int], make_event: Callable[[], torch.cuda.Event]) -> bool:
        """Copy a contiguous tensor; False where there is no room yet. `make_event`: for CUDA, recorded after the copy.

        The current stream must be the one that computed the tensor.
        """
        length = tensor.numel() * tensor.element_size()
        start = self._allocate(length, lanes)
        if start is None:
            return False
        self._views.get(tensor.dtype, start, tensor.numel()).copy_(tensor, non_blocking=True)
        for lane in lanes:
            self._sent_to[lane] += 1
        numbers = tuple((lane, self._sent_to[lane]) for lane in lanes)
        self._sent.append(_Sent(self._head, numbers))
        # Of the values that are to be sent: the ring may hold others, if it is read before they are written.
        checksum = _checksum(tensor) if self._verify else 0
        if tensor.is_cuda or self._unposted:
            copied = make_event() if tensor.is_cuda else None
            self._unposted.append(_Unposted(copied, numbers, start, length, checksum))
        else:
            self._post(numbers, start, length, checksum)
        return True

    @property
    def is_posted(self) -> bool:
        return not self._unposted

    def post(self, wait: bool) -> bool:
        """Post messages whose copies are done, in order; with `wait` at least one. Whether any was posted."""
        posted = False
        while self._unposted:
            message = self._unposted[0]
            if message.copied is not None and not message.copied.query():
                if posted or not wait:
                    break
                message.copied.synchronize()
            self._unposted.popleft()
            self._post(message.numbers, message.start, message.length, message.checksum)
            posted = True
        return posted

    def wait(self, sleep: Sleep) -> None:
        """Until the lane that `send` had no room in is freed of one more message."""
        sleep(self._free[self._blocking], self._blocking % self._world_size)
        self._freed_by[self._blocking] += 1

    def synchronize(self) -> None:
        """Until no device copies into the ring; what is not posted by then never will be."""
        while self._unposted:
            if (copied := self._unposted.popleft().copied) is not None:
                copied.synchronize()

    def close(self) -> None:
        """Let go of the memory."""
        self._tables.clear()

    def _post(self, numbers: tuple[tuple[int, int], ...], start: int, length: int, checksum: int) -> None:
        for lane, number in numbers:
            table = self._tables[lane]
            for place, entry in enumerate((start, length, checksum, number), number % ENTRIES * FIELDS):
                table[place] = entry
            self._there[lane].post()

    def _allocate(self, length: int, lanes: Sequence[int]) -> int | None:
        """The first byte of a free range in one piece, counted from the segment's beginning."""
        for lane in lanes:
            if self._sent_to[lane] - self._freed_by[lane] >= ENTRIES and not self._has_freed(
                lane, self._sent_to[lane] - ENTRIES + 1
            ):
                return None
        room = -(-length // ALIGN) * ALIGN
        begin = self._head
        if begin % self._ring_bytes + room > self._ring_bytes:
            begin += self._ring_bytes - begin % self._ring_bytes
        while begin + room - self._tail > self._ring_bytes:
            oldest = self._sent[0]
            for lane, number in oldest.numbers:
                if not self._has_freed(lane, number):
                    return None
            self._tail = oldest.end
            self._sent.popleft()
            if not self._sent:
                self._tail = self._head
        self._head = begin + room
        return self._first + begin % self._ring_bytes

    def _has_freed(self, lane: int, number: int) -> bool:
        while self._freed_by[lane] < number:
            if not self._free[lane].try_wait():
                self._blocking = lane
                return False
            self._freed_by[lane] += 1
        return True


class Inbox:
    """Messages of the other ranks to this one. `receive` gives a view of the writer's ring, valid until `free`."""

    def __init__(self, segment: Segment, layout: Layout, rank: int, views: Views, verify: bool) -> None:
        address, to = segment.address, [(writer, rank, is_result) for is_result, writer in _lanes(layout)]
        self._there = [Semaphore(address + layout.semaphore(*lane, False)) for lane in to]
        self._free = [Semaphore(address + layout.semaphore(*lane, True)) for lane in to]
        self._tables = [segment.numbers(layout.table(*lane), ENTRIES * FIELDS) for lane in to]
        self._world_size, self._name = layout.world_size, layout.name
        self._views, self._verify = views, verify
        self._posted, self._received = [0] * len(to), [0] * len(to)

    def has(self, lane: int) -> bool:
        """Whether a message is there that was not received yet."""
        if self._posted[lane] == self._received[lane]:
            if not self._there[lane].try_wait():
                return False
            self._posted[lane] += 1
        return True

    def wait(self, lane: int, sleep: Sleep) -> None:
        if self._posted[lane] == self._received[lane]:
            sleep(self._there[lane], lane % self._world_size)
            self._posted[lane] += 1

    def receive(self, lane: int, dtype: torch.dtype, count: int) -> Tensor:
        """The next message, of `count` elements; `has` said that it is there."""
        writer = self._name(lane % self._world_size)
        self._received[lane] += 1
        number = self._received[lane]
        place = number % ENTRIES * FIELDS
        start, length, checksum, sent = self._tables[lane][place : place + FIELDS].tolist()
        if sent != number:
            raise RankError(f"chunk {number} of rank {writer} arrived as number {sent}: the shared memory is damaged")
        if length != count * dtype.itemsize:
            raise RankError(
                f"rank {writer} sent {length} bytes where {count * dtype.itemsize} were expected: the ranks started "
                "different collectives"
            )
        message = self._views.get(dtype, start, count)
        if self._verify and _checksum(message) != checksum:
            # Its memory, the ring or this rank's may be wrong: nothing was made of it, and a new group does it again.
            raise GroupLostError(describe_wrong(number, writer))
        return message

    def free(self, lane: int) -> None:
        """The writer may write over the oldest message that was not freed."""
        self._free[lane].post()

    def close(self) -> None:
        """Let go of the memory."""
        self._tables.clear()
