"""The leader's side of machines/transfer.py: takes parts of checkpoints, and gives out what ranks resume from.

The leader's process does not know where the user's script writes: rank 0, which runs on the same machine, opens a
folder (`share`) and proves that it is on this machine by a file in a private folder, since everybody in the run knows
the token. Invariant: nothing is read but the files that rank 0 listed, and nothing is written but `rank-N.json` and
`rank-N.safetensors` of other ranks than 0 and the mark of a failed save, in folders named as rank 0's saver names them.
"""

import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uneven.files import failure_mark, leave_mark, read_mark, why_not_written
from uneven.machines.messages import FILES, checked
from uneven.machines.transfer import ANSWER_S, MAX_FILE, NEVER, NOT_YET, RefusedError, receive_file, send_file
from uneven.machines.wire import BadMessageError, Connection, WireError

IDLE_S = 60.0  # for the next request of a connection
MAX_RECORD = 1 << 30  # bytes of a rank's JSON
MAX_SHARES = 64
AWAITED_S, LOOK_S = 10.0, 0.1  # for a checkpoint to become whole, before the other side asks again
GIVEN_UP = "another rank has given this save up"
_KEY = re.compile(r"\w{1,64}")
_PART = re.compile(r"rank-([1-9]\d{0,5})\.(json|safetensors)")


@dataclass(frozen=True)
class _Share:
    """A folder that rank 0 has opened: files of it to read, or how messages name each rank that may bring parts."""

    folder: Path
    names: frozenset[str]
    places: tuple[str, ...]


class FileService:
    """One per leader, for all connections of `role: files`; `handle` runs in a thread of the door's for each."""

    def __init__(self, say: Callable[[str], None] = lambda _: None) -> None:
        """`say` shows a line about a machine that does not speak as agreed."""
        self._say = say
        self._shares: dict[str, _Share] = {}
        self._lock = threading.Lock()

    def handle(self, connection: Connection, message: dict[str, Any]) -> None:
        """Answer the first message and those that follow, until the other side closes; it raises nothing."""
        actions = {
            "share": self._open,
            "withdraw": self._withdraw,
            "put": self._put,
            "give up": self._give_up,
            "get": self._get,
        }
        where = connection.peer_address
        try:
            request = checked(message, FILES)
            while (action := actions.get(request.get("do", ""))) is not None:
                try:
                    action(connection, request)
                except RefusedError as refused:
                    connection.send(refused=str(refused))
                request = checked(connection.read(IDLE_S), FILES)
            connection.send(refused="there is no such request")
        except BadMessageError as error:
            self._say(f"  a connection of {where} was ended: {error}")
            with suppress(WireError):
                connection.send(refused=str(error))
        except OSError:
            pass  # a WireError, too: the other side is gone
        connection.close()

    def _open(self, connection: Connection, message: dict[str, Any]) -> None:
        key, folder = message.get("key"), Path(str(message.get("folder")))
        names, places = message.get("names"), message.get("places")
        if not (isinstance(key, str) and _KEY.fullmatch(key) and folder.is_absolute()):
            raise RefusedError("a folder is shared by its whole path, under a key")
        if not isinstance(names, list) or not isinstance(places, list):
            raise RefusedError("names and places are lists")
        with tempfile.TemporaryDirectory(prefix="uneven-door-") as private:
            proof = Path(private) / os.urandom(8).hex()
            connection.send(prove=str(proof))
            is_proven = connection.read(ANSWER_S).get("do") == "proven"
            if not is_proven or not proof.exists() or proof.stat().st_uid != os.getuid():
                raise RefusedError("only rank 0, on the leader's machine, may open a folder")
        share = _Share(folder, frozenset(map(str, names)), tuple(str(place)[:200] for place in places))
        with self._lock:
            self._shares.pop(key, None)
            self._shares[key] = share
            while len(self._shares) > MAX_SHARES:  # of the runs of a script that trains many times
                del self._shares[next(iter(self._shares))]
        connection.send(done=True)

    def _withdraw(self, connection: Connection, message: dict[str, Any]) -> None:
        with self._lock:
            self._shares.pop(str(message.get("key")), None)
        connection.send(done=True)

    def _get(self, connection: Connection, message: dict[str, Any]) -> None:
        share, name = self._share(message) if "partial" not in message else self._await(message), message.get("name")
        if name not in share.names or Path(str(name)).name != name:
            raise RefusedError(f"{str(name)[:100]!r} is not shared")
        try:
            send_file(connection, share.folder / name)
        except WireError:
            raise
        except OSError as error:
            raise RefusedError(f"{name} cannot be read: {error.strerror or error}") from error

    def _await(self, message: dict[str, Any]) -> _Share:
        """What rank 0 shares when a checkpoint is whole, as long as it may become so; RefusedError where it is not."""
        token = str(message["partial"]).rpartition("-")[2].rpartition("_")[0]
        end_s = time.monotonic() + AWAITED_S
        while time.monotonic() < end_s:
            with self._lock:
                found, run = self._shares.get(str(message.get("key"))), self._shares.get(token)
            if found is not None:
                return found
            if run is None or failure_mark(self._partial(run, {**message, "key": token})).exists():
                raise RefusedError(NEVER)
            time.sleep(LOOK_S)
        raise RefusedError(NOT_YET)

    def _put(self, connection: Connection, message: dict[str, Any]) -> None:
        """A file of a rank's part. Where it fails all ranks are told, by the mark of a failed save, and it is removed
        with what came before it: rank 0 must not wait for it."""
        share = self._share(message)
        partial, name = self._partial(share, message), str(message.get("name"))
        if (found := _PART.fullmatch(name)) is None or int(found[1]) >= len(share.places):
            raise RefusedError(f"{name[:100]!r} is no part of this checkpoint")
        place = share.places[int(found[1])]
        self._refuse_given_up(partial)
        try:
            size = _make_room(partial, message.get("size"), MAX_FILE if found[2] == "safetensors" else MAX_RECORD)
            connection.send(go=True)
            receive_file(connection, partial, {name}, limit=size)
        except OSError as error:  # a WireError, too
            why = str(error) if isinstance(error, WireError) else why_not_written(error)
            why = why if place in why else f"{why}, in the part of {place}"
            if not failure_mark(partial).exists():
                leave_mark(failure_mark(partial), why, name)
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, WireError) and not isinstance(error, RefusedError):
                raise
            raise RefusedError(read_mark(failure_mark(partial)) or why) from error
        self._refuse_given_up(partial)  # the mark may have come meanwhile, and the folder been made again
        connection.send(done=True)

    def _refuse_given_up(self, partial: Path) -> None:
        if (why := read_mark(failure_mark(partial))) is not None:
            shutil.rmtree(partial, ignore_errors=True)
            raise RefusedError(why or GIVEN_UP)

    def _give_up(self, connection: Connection, message: dict[str, Any]) -> None:
        share = self._share(message)
        partial, rank = self._partial(share, message), message.get("rank")
        if not isinstance(rank, int) or not 0 < rank < len(share.places):
            raise RefusedError("no rank of this run")
        if not (mark := failure_mark(partial)).exists():
            why = " ".join(str(message.get("why"))[:500].split())
            leave_mark(mark, f"{why}, on {share.places[rank]}", str(rank))
        shutil.rmtree(partial, ignore_errors=True)
        connection.send(done=True)

    def _share(self, message: dict[str, Any]) -> _Share:
        with self._lock:
            found = self._shares.get(str(message.get("key")))
        if found is None:
            raise RefusedError("this run has no such folder open: it has ended, or this machine is not in it")
        return found

    def _partial(self, share: _Share, message: dict[str, Any]) -> Path:
        name = str(message.get("partial"))
        if not share.places or not re.fullmatch(rf"\.(step|epoch)-\d+\.partial-{message.get('key')}_\d+", name):
            raise RefusedError(f"{name[:100]!r} is no checkpoint of this run")
        return share.folder / name


def _make_room(partial: Path, size: Any, most: int) -> int:
    """The size that was announced; OSError or RefusedError where such a file cannot be written."""
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= most:
        raise RefusedError(f"a file of {str(size)[:40]} bytes, where {most:,} are allowed")
    partial.mkdir(parents=True, exist_ok=True)
    if size > (free := shutil.disk_usage(partial).free):
        raise RefusedError(f"no space left ({size / 1e6:,.1f} MB come, {free / 1e6:,.1f} MB are free)")
    return size
