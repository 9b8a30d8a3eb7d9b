"""The one reader of a stream that cannot be opened in the middle: it reads every sample once and gives it to its rank.

A Reader lives on rank 0. Ranks ask for ranges of positions; whoever trains a range gets its samples, which are then
dropped, so exactly once holds over what the stream gave. The other ranks ask through ReaderServer and ReaderClient: an
abstract Unix socket of this machine that leaves no file behind, with a key that only the ranks of the run know, and for
processes of this user alone; that is why samples that arrive may be unpickled. data/stream.py makes batches of them.
"""

import json
import os
import pickle
import re
import secrets
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch
from torch import Tensor

from uneven.data.pickling import dumps, loads
from uneven.errors import GroupLostError, InputError, RankError

CLOSE_S = 5.0
_END = object()
_NAME = re.compile(r"uneven-[0-9a-f]{32}")
_CREDENTIALS = struct.Struct("3i")  # process, user, group

Place = tuple[int, int]  # epoch, position


@dataclass(frozen=True)
class Extent:
    """What a run reads of a stream."""

    epochs: int
    length: int | None = None  # samples of an epoch; None where only the end of the stream tells
    # The first place that anybody will take, where a run is resumed or goes on after a loss; what lies before it in its
    # epoch is read and dropped, as with `go_to`.
    start: Place = (0, 0)
    trained: Sequence[tuple[Place, Place]] = ()  # the same of these ranges after it, in order
    sizes: Sequence[int] = ()  # of the epochs before


class Reader:
    """Samples of a stream by (epoch, position), each given out `uses` times and then dropped.

    `read_pass(epoch)` iterates over an epoch's samples. A thread reads until `ahead` samples wait to be taken; without
    it (`ahead` = 0) the caller of `take` reads, inside the context `around()`.
    """

    def __init__(
        self,
        read_pass: Callable[[int], Iterator[Any]],
        extent: Extent,
        *,
        ahead: int = 0,
        uses: int = 1,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
        before: "Reader | None" = None,
    ) -> None:
        """`before`: the closed one of the same data set. It may still wait for a sample, and two never read at once."""
        self._read_pass = read_pass
        self._epochs = extent.epochs
        self._length = extent.length
        self._ahead = ahead
        self._uses = uses
        self._around = around
        self._samples: Iterator[Any] | None = None
        self._before = None if before is None else before._thread
        self._ready: dict[Place, list[Any]] = {}  # [sample, uses left]
        self._start = extent.start
        self._trained = deque(extent.trained)
        self._front = (extent.start[0], 0)  # the first position not read yet
        self._wanted = (0, 0)  # the end of what was asked for
        self._sizes: list[int] = list(extent.sizes)  # of the epochs that were read to their end
        self._error: BaseException | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        if ahead:
            self._thread = threading.Thread(target=self._run, name="uneven-reader", daemon=True)
            self._thread.start()

    def take(self, epoch: int, first: int, stop: int) -> list[Any]:
        """The samples at these positions; waits until they are read."""
        with self._changed:
            self._wait_for((epoch, stop))
            if epoch < self._start[0]:
                return []
            return [self._give((epoch, position)) for position in range(first, stop)]

    def ends_within(self, epoch: int, first: int, count: int) -> int:
        """The samples of the epoch if none follows position first + count - 1, else 0; waits until that is known."""
        with self._changed:
            self._wait_for((epoch, first + count + 1))
            is_ended = epoch < len(self._sizes) and self._sizes[epoch] <= first + count
            return self._sizes[epoch] if is_ended else 0

    def go_to(self, epoch: int) -> None:
        """Nobody needs what lies before this epoch: it is read and dropped; whoever has asked for it gets nothing."""
        with self._changed:
            self._start = max(self._start, (epoch, 0))
            self._ready = {place: entry for place, entry in self._ready.items() if place >= self._start}
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread, unless it waits for a sample that does not come."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _give(self, place: Place) -> Any:
        if place not in self._ready:
            raise RuntimeError(f"position {place[1]} of epoch {place[0]} was asked for twice")
        entry = self._ready[place]
        entry[1] -= 1
        if not entry[1]:
            del self._ready[place]
            self._changed.notify_all()
        return entry[0]

    def _wait_for(self, place: Place) -> None:
        """Until the stream is read up to this position, or the position's epoch has ended; the lock is held."""
        self._wanted = max(self._wanted, place)
        self._changed.notify_all()
        with nullcontext() if self._ahead else self._around():
            while self._front < place and self._front[0] < self._epochs:
                if self._error is not None:
                    raise self._error
                if self._is_closed:
                    raise GroupLostError("the reader of the stream was closed")
                if self._ahead:
                    self._changed.wait()
                else:
                    self._add(self._next())

    def _run(self) -> None:
        if self._before is not None:
            self._before.join()
            self._before = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._has_room)
                if self._is_closed or self._front[0] == self._epochs:
                    self._samples = None  # ends a loader process
                    return
            try:
                sample = self._next()  # without the lock: it may take its time
                with self._changed:
                    self._add(sample)
            except BaseException as error:  # given to every rank that waits for a sample
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return

    @property
    def _has_room(self) -> bool:
        return len(self._ready) < self._ahead or self._front < self._wanted or self._front[0] == self._epochs

    def _next(self) -> Any:
        epoch, position = self._front
        if position == self._length:
            return _END  # a longer stream is read no further than its len()
        if self._samples is None:
            self._samples = iter(self._read_pass(epoch))
        return next(self._samples, _END)

    def _add(self, sample: Any) -> None:
        epoch, position = self._front
        if sample is _END:
            self._check_end(epoch, position)
            self._samples = None
            self._sizes.append(position)
            self._front = (epoch + 1, 0)
        else:
            if self._is_wanted:
                self._ready[self._front] = [sample, self._uses]
            self._front = (epoch, position + 1)
        self._changed.notify_all()

    @property
    def _is_wanted(self) -> bool:
        """Whether anybody will take the sample at the front."""
        while self._trained and self._trained[0][1] <= self._front:
            self._trained.popleft()
        return self._front >= self._start and not (self._trained and self._trained[0][0] <= self._front)

    def _check_end(self, epoch: int, position: int) -> None:
        if self._length is not None and position < self._length:
            raise InputError(
                f"the stream ended after {position} samples in epoch {epoch}, and its len() is {self._length}; "
                "make len() right, or leave it out"
            )
        if position == 0:
            used_up = ": every epoch calls iter(dataset), which must begin anew" if epoch else ""
            raise InputError(f"the stream gave no sample in epoch {epoch}{used_up}")


class ReaderServer:
    """Answers the other ranks' questions to the Reader: one thread for each of `connections`, until `close`."""

    def __init__(self, reader: Reader, connections: int) -> None:
        self._reader, self._left = reader, connections
        self._lock = threading.Lock()
        self._open: set[Connection] = set()
        self._closed = threading.Event()
        self._key = secrets.token_bytes(32)
        self._name = f"uneven-{secrets.token_hex(16)}"
        self._listener = Listener(f"\0{self._name}", family="AF_UNIX", authkey=self._key)
        threading.Thread(target=self._accept, name="uneven-reader-accept", daemon=True).start()

    @property
    def address(self) -> bytes:
        """For ReaderClient, on the other ranks; as JSON, since it comes to them through a collective."""
        return json.dumps([self._name, self._key.hex()]).encode()

    def close(self) -> None:
        """Whoever waits for an answer hears that none comes, and the threads end."""
        with self._lock:
            self._closed.set()
            for connection in self._open:
                with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as sock:
                    sock.shutdown(socket.SHUT_RDWR)
        with suppress(OSError), socket.socket(socket.AF_UNIX) as sock:  # wakes the one that accepts, if it still does
            sock.connect(f"\0{self._name}")

    def _accept(self) -> None:
        with self._listener:
            while self._left and not self._closed.is_set():
                try:
                    connection = self._listener.accept()
                except (AuthenticationError, EOFError, OSError):
                    continue  # a stranger without the key
                if not _is_own_user(connection):
                    connection.close()
                    continue
                self._left -= 1
                with self._lock:
                    self._open.add(connection)
                    if self._closed.is_set():
                        connection.close()
                        return
                name = f"uneven-reader-{self._left}"
                threading.Thread(target=self._serve, args=(connection,), name=name, daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        try:
            while True:
                name, *arguments = json.loads(connection.recv_bytes())
                connection.send_bytes(self._answer(name, arguments))
        except (EOFError, OSError):
            return  # the rank has ended, or does not want the rest
        finally:
            with self._lock:
                self._open.discard(connection)
                connection.close()

    def _answer(self, name: str, arguments: Sequence[int]) -> bytes:
        try:
            found = self._reader.take(*arguments) if name == "take" else self._reader.ends_within(*arguments)
            return pack((found, None))
        except (InputError, GroupLostError) as error:
            return pack((str(error), type(error)))
        except BaseException as error:  # a sample that cannot be pickled, too
            return pack((f"rank 0 could not read the stream: {type(error).__name__}: {error}", RankError))


class ReaderClient:
    """One connection to the Reader of rank 0. Questions may be sent ahead; answers come in their order."""

    def __init__(self, address: bytes) -> None:
        try:
            name, key = json.loads(address)
            is_known, secret = _NAME.fullmatch(name) is not None, bytes.fromhex(key)
        except (ValueError, TypeError):
            is_known = False
        if not is_known:
            raise RankError("what came as the address of rank 0's reader is none")
        with _NamingTheRank():
            self._connection = Client(f"\0{name}", family="AF_UNIX", authkey=secret)
        if not _is_own_user(self._connection):
            raise RankError("the reader at the address that rank 0 sent is of another user")

    def send(self, name: str, *arguments: int) -> None:
        with _NamingTheRank():
            self._connection.send_bytes(json.dumps([name, *arguments]).encode())

    def receive(self) -> Any:
        with _NamingTheRank():
            answer, failed = unpack(self._connection.recv_bytes())
        if failed is not None:
            raise failed(answer)
        return answer

    def close(self) -> None:
        self._connection.close()


class LocalReader:
    """What ReaderClient is on other ranks: the same questions, answered in this process."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._questions: deque[tuple[int, int, int]] = deque()

    def send(self, name: str, *arguments: int) -> None:
        assert name == "take", "only ranges are asked for ahead"
        self._questions.append((arguments[0], arguments[1], arguments[2]))

    def receive(self) -> Any:
        return self._reader.take(*self._questions.popleft())

    def close(self) -> None:
        self._reader.close()


class _NamingTheRank:
    """Turns the errors of a closed connection into one that names the rank that is gone, or has lost the group."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, EOFError | OSError):
            raise GroupLostError("rank 0, which reads the stream for all ranks, has closed its connection") from error


def _is_own_user(connection: Connection) -> bool:
    """Whether the process at the other end is of this user, as the kernel has it: what it sends is unpickled."""
    with socket.socket(fileno=os.dup(connection.fileno())) as sock:
        peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(peer)[1] == os.getuid())


def pack(value: Any) -> bytes:
    """A pickle with tensors as their bytes; torch's own way is an archive or a file of shared memory for each."""
    tensors: list[Tensor] = []

    def take(part: Any) -> int | None:
        is_plain = type(part) is Tensor and part.device.type == "cpu" and part.layout == torch.strided
        if not is_plain or part.requires_grad or part.is_quantized:
            return None
        tensors.append(part)
        return len(tensors) - 1

    pickled = dumps(value, take)
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]
    return pickle.dumps((pickled, [(data, t.dtype, t.shape) for data, t in zip(flat, tensors, strict=True)]))


def unpack(data: bytes) -> Any:
    """What `pack` packed; it must come from a rank of this run."""
    pickled, tensors = pickle.loads(data)
    return loads(pickled, lambda key: _tensor(*tensors[key]))


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).view(shape)
