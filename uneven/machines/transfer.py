"""Files between the leader and the other machines of a run: a rank's parts of checkpoints, and what it resumes from.

`LeaderFiles` is what a rank has: it reaches the leader's door and asks. machines/file_service.py answers there. A file
is a JSON line (name, size, crc32) and exactly so many bytes. Invariant: it is never whole in memory, and under its
name it is whole: it is written beside its place, compared with its checksum, synced and renamed.
"""

import os
import re
import socket
import threading
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from uneven.errors import InputError
from uneven.files import replacing
from uneven.format import printable
from uneven.machines.wire import Connection, WireError, greet

CONNECT_S = 10.0
ANSWER_S = 60.0  # a busy disk may take its time to sync
STALL_S = 30.0  # without a byte from the other side
MAX_FILE = 1 << 42
SUMMING_S = 1800.0  # the other side reads a whole file before it sends it
# What the leader says of a checkpoint that is not whole: ask again, or it will not become so.
NOT_YET, NEVER = "it is not whole yet", "it was given up"
_PIECE, _SYNC = 1 << 20, 1 << 27
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


class RefusedError(WireError):
    """The other side does not do what was asked, and says why in one line; the connection can still be used."""


def sum_file(path: Path) -> tuple[int, str]:
    """Length and checksum of a file; of a large one that takes a while."""
    size = crc = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            size, crc = size + len(piece), zlib.crc32(piece, crc)
    return size, f"{crc:08x}"


def send_file(connection: Connection, path: Path, sums: tuple[int, str] | None = None) -> None:
    """WireError where the connection is lost, OSError where the file cannot be read; `sums` where they are known."""
    size, crc = sums or sum_file(path)
    with path.open("rb") as file:
        connection.send_file(file, size, STALL_S, name=path.name, crc32=crc)


def receive_file(
    connection: Connection,
    folder: Path,
    expected: Collection[str],
    limit: int = MAX_FILE,
    header_s: float = ANSWER_S,
) -> Path:
    """The next file into a folder, in place of one of its name there; its header comes within `header_s`.

    RefusedError where the file is not as announced or, with the reason, OSError where it cannot be written: its bytes
    were read nonetheless, so the connection can still be used. WireError where the connection is lost, or the other
    side sends what was not expected. Nothing is left in the folder then.
    """
    header = connection.read(header_s)
    if "refused" in header:
        raise RefusedError(printable(str(header["refused"])[:500]))
    name, size = header.get("name"), header.get("size")
    if not isinstance(name, str) or name not in expected or not _NAME.fullmatch(name):
        raise WireError(f"an unexpected file {str(name)[:100]!r}")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= limit:
        raise WireError(f"{name}: a size of {str(size)[:40]} bytes, where {limit:,} are allowed")
    pieces = connection.pieces(size, STALL_S)
    try:
        with replacing(folder / name) as file:
            found = unsynced = 0
            for piece in pieces:
                file.write(piece)
                found, unsynced = zlib.crc32(piece, found), unsynced + len(piece)
                if unsynced >= _SYNC:  # or the sender of a large file waits for its end too long
                    file.flush()
                    os.fsync(file.fileno())
                    unsynced = 0
            if f"{found:08x}" != header.get("crc32"):
                raise RefusedError(
                    f"{name} was damaged on its way: its crc32 is {found:08x} instead of {header.get('crc32')}"
                )
    except WireError:
        raise
    except OSError:
        for _ in pieces:  # or the sender could not be told why
            pass
        raise
    return folder / name


class LeaderFiles:
    """The leader's file service, as one rank reaches it; each call is a connection of its own.

    `make_scratch` makes a private folder of this rank's on this machine, on the first use; `close` calls `remove`.
    """

    def __init__(
        self, door: tuple[str, int, str], make_scratch: Callable[[], Path], remove: Callable[[Path], None]
    ) -> None:
        self._address, self._port = door[:2]
        self._token = door[2]
        self._make_scratch, self._remove = make_scratch, remove
        self._scratch: Path | None = None
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()

    @property
    def scratch(self) -> Path:
        if self._scratch is None:
            self._scratch = self._make_scratch()
        return self._scratch

    def close(self) -> None:
        """Remove what this rank has on this machine."""
        if self._scratch is not None:
            self._remove(self._scratch)
            self._scratch = None

    def hang_up(self) -> None:
        """End what is under way in another thread, which gets a WireError."""
        with self._lock:
            for sock in self._open:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def share(self, key: str, folder: Path, *, names: Sequence[str] = (), places: Sequence[str] = ()) -> None:
        """Called by rank 0: open a folder to the other machines, for reading (`names` of files in it) or for their
        parts of checkpoints (`places`: how messages name each rank). WireError where the leader does not."""
        with self._asking("share", key=key, folder=str(folder.absolute()), names=names, places=places) as connection:
            proof = Path(str(_answer(connection, "prove")))
            # Not where a stranger asks us to write: an empty file of a name that only the leader could have made up.
            if not proof.parent.is_dir() or proof.parent.stat().st_uid != os.getuid():
                raise RefusedError("rank 0 is not on the leader's machine")
            proof.touch(exist_ok=False)
            connection.send(do="proven")
            _answer(connection, "done")

    def withdraw(self, key: str) -> None:
        """Called by rank 0: the folder is open no longer. A leader that is gone has nothing open."""
        with suppress(WireError), self._asking("withdraw", key=key) as connection:
            _answer(connection, "done")

    def put(self, key: str, partial: str, paths: Sequence[Path]) -> None:
        """This rank's part of a checkpoint, the last file in one piece with the others; WireError where it failed."""
        sums = {path: sum_file(path) for path in paths}  # before the leader waits for it
        with self._asking() as connection:
            for path in paths:
                connection.send(role="files", do="put", key=key, partial=partial, name=path.name, size=sums[path][0])
                _answer(connection, "go")
                send_file(connection, path, sums[path])
                _answer(connection, "done")

    def give_up(self, key: str, partial: str, rank: int, why: str) -> None:
        """Tell the other ranks that this one has no part of this checkpoint; WireError where they cannot be told."""
        with self._asking("give up", key=key, partial=partial, rank=rank, why=why) as connection:
            _answer(connection, "done")

    def get(self, key: str, names: Sequence[str], into: Path) -> None:
        """Copies of files that rank 0 has shared; WireError where one does not come, OSError where it has no room."""
        with self._asking() as connection:
            for name in names:
                connection.send(role="files", do="get", key=key, name=name)
                receive_file(connection, into, {name}, header_s=SUMMING_S)

    def get_awaited(
        self, key: str, partial: str, name: str, into: Path, is_cancelled: Callable[[], bool] = lambda: False
    ) -> bool:
        """A copy of a file of a checkpoint that rank 0 shares when it is whole; `partial` is its name until then.

        False where it was given up, or `is_cancelled`; WireError where the leader is gone, OSError without room.
        """
        while not is_cancelled():
            with self._asking("get", key=key, name=name, partial=partial) as connection:
                try:
                    receive_file(connection, into, {name}, header_s=SUMMING_S)
                except RefusedError as refused:
                    if str(refused) == NOT_YET:
                        continue
                    if str(refused) == NEVER:
                        return False
                    raise
                return True
        return False

    @contextmanager
    def _asking(self, do: str | None = None, **request: Any) -> Iterator[Connection]:
        try:
            sock = socket.create_connection((self._address, self._port), CONNECT_S)
        except OSError as error:
            raise WireError(f"the leader at {self._address} port {self._port} is not reached: {error}") from error
        with self._lock:
            self._open.add(sock)
        try:
            connection = greet(sock, self._token)
            if do is not None:
                connection.send(role="files", do=do, **request)
            yield connection
        except InputError as error:
            raise WireError(str(error)) from error
        finally:
            with self._lock:
                self._open.discard(sock)
            sock.close()


def _answer(connection: Connection, wanted: str) -> Any:
    answer = connection.read(ANSWER_S)
    if "refused" in answer:
        raise RefusedError(printable(str(answer["refused"])[:500]))
    if wanted not in answer:
        raise WireError("the leader does not speak as agreed")
    return answer[wanted]
