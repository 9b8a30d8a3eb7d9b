"""Saver: writes checkpoints in the background, one per rank.

The training thread starts a save at a slot where all ranks stand and trains on; the saver's thread copies the tensors
(`take`), and the training thread waits for that copy, in `wait_taken()`, only before it changes them. Then the thread
writes (results/checkpoint.py); rank 0's also waits for the other ranks' parts and gives the folder its name.

Invariants: at most one save at a time. A save that fails costs nothing but itself: it never raises into training, the
older checkpoints are not touched, nothing half-written stays, and one line tells the user. All ranks start the same
saves in the same order, so the number of a save is the same on all of them.

A rank on another machine than rank 0 writes its part to a private folder there and sends it to rank 0's folder through
the leader (machines/transfer.py); the leader tells it whether another rank has given up, and tells the others.
"""

import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from torch import Tensor

from uneven.errors import InputError
from uneven.files import failure_mark, leave_mark, partial_folder, read_mark, why_not_written
from uneven.machines.transfer import LeaderFiles, RefusedError
from uneven.machines.wire import WireError
from uneven.results.checkpoint import (
    OTHER_RANK,
    RankPart,
    SaveGivenUpError,
    Whole,
    part_files,
    seal,
    write_rank_part,
)
from uneven.results.checkpoint_folders import find_checkpoints
from uneven.results.record import has_all_files, read_record

Take = Callable[[], tuple[RankPart, Whole | None]]
THREAD = "uneven-saver"
CHECK_S = 0.05  # how often who waits for a save looks whether it still makes sense


@dataclass
class _Save:
    folder: Path
    partial: Path
    take: Take
    after: Callable[[], None] | None
    needed: int = 0  # bytes of all ranks' tensors, about


class Saver:
    """The saves of one rank. `token` is a random word that all ranks of the run share and other runs do not.

    `places` is how messages name each rank; `leader` is given on ranks of other machines than rank 0's.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        token: str,
        deadline_s: float = 600.0,
        *,
        places: Sequence[str] = (),
        leader: LeaderFiles | None = None,
    ) -> None:
        self.saved: list[Path] = []  # on rank 0: the checkpoints written, in order
        self.notes: list[str] = []  # lines for the user, until `take_notes`
        self._rank, self._world_size = rank, world_size
        self._token = token
        self._places = tuple(places) or tuple(f"rank {number}" for number in range(world_size))
        self._leader = leader
        self._deadline_s = deadline_s  # how long rank 0 waits for the other ranks' parts
        self._jobs: SimpleQueue[_Save | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._taken, self._idle = threading.Event(), threading.Event()
        self._taken.set()
        self._idle.set()
        self._closing = threading.Event()
        self._homes: set[Path] = set()  # the folders in which there may be marks of failed saves
        self._count = 0

    def start(self, folder: Path, take: Take, after: Callable[[], None] | None = None) -> None:
        """Begin to save to `folder`, after the save before it is done.

        `take` runs in the saver's thread and copies the tensors to host memory; rank 0's also gives what is
        everybody's. `after` runs in that thread once this rank's files (on rank 0: the checkpoint) are in place.
        """
        self.finish()
        partial = self.next_partial(folder)
        self._count += 1
        self._homes.add(folder.parent)
        self._idle.clear()
        self._taken.clear()
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=THREAD, daemon=True)
            self._thread.start()
        self._jobs.put(_Save(folder, partial, take, after))

    def next_partial(self, folder: Path) -> Path:
        """Where the next save, to this folder, is written until it is whole: the same on all ranks."""
        return partial_folder(folder, f"{self._token}_{self._count}")

    def wait_taken(self) -> None:
        """Return when no `take` is running: called before tensors change. Otherwise it costs one look at a flag."""
        if not self._taken.is_set():
            self._taken.wait()

    @property
    def is_closing(self) -> bool:
        return self._closing.is_set()

    def finish(self, check: Callable[[], None] = lambda: None) -> None:
        """Wait for the save that is under way. `check` is called meanwhile, and may raise: nobody waits then."""
        while not self._idle.wait(CHECK_S):
            check()

    def take_notes(self) -> list[str]:
        """The lines since the last call."""
        if not self.notes:
            return []
        with self._lock:
            notes, self.notes = self.notes, []
        return notes

    def close(self) -> None:
        """End the thread. A save that still waits for other ranks is given up; call `finish` first to have it."""
        self._closing.set()
        if self._leader is not None:
            self._leader.hang_up()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        for home in self._homes if self._rank == 0 else ():
            for mark in home.glob(f".*.failed-{self._token}_*"):
                mark.unlink(missing_ok=True)

    def _serve(self) -> None:
        while (save := self._jobs.get()) is not None:
            self._run(save)
            self._idle.set()

    def _run(self, save: _Save) -> None:
        try:
            self._write(save)
        except Exception as error:  # whatever failed, training goes on
            self._give_up(save, _reason(error))
            return
        finally:
            self._taken.set()
        try:
            if save.after is not None:
                save.after()
        except Exception as error:
            if not self.is_closing:
                self._note(f"after saving {save.folder}: {_reason(error)}; training is not affected")

    def _write(self, save: _Save) -> None:
        part, whole = save.take()
        self._taken.set()
        save.needed = _size(part.tensors) * self._world_size
        if whole is not None:
            save.needed += _size(whole.tensors) + _size(whole.best or {})
        if self._leader is not None:
            self._send(save, part, self._leader)
            return
        mark = failure_mark(save.partial)
        if mark.exists():
            raise SaveGivenUpError(OTHER_RANK)
        write_rank_part(save.partial, self._rank, part)
        if self._rank == 0:
            assert whole is not None, "rank 0 gives what is everybody's"
            seal(save.partial, save.folder, self._world_size, whole, self._patience(save.partial), self._places)
            self.saved.append(save.folder)
        elif mark.exists():  # it may have come after this rank's look, and the folder been made again
            raise SaveGivenUpError(OTHER_RANK)

    def _patience(self, partial: Path) -> Callable[[], bool]:
        """Whether rank 0 waits no longer: nothing came for `deadline_s`. Over a slow link a part takes its time."""
        end_s, seen = time.monotonic() + self._deadline_s, 0

        def is_over() -> bool:
            nonlocal end_s, seen
            if not self._closing.is_set() and time.monotonic() > end_s and (size := _bytes_in(partial)) > seen:
                end_s, seen = time.monotonic() + self._deadline_s, size
            return self._closing.is_set() or time.monotonic() > end_s

        return is_over

    def _send(self, save: _Save, part: RankPart, leader: LeaderFiles) -> None:
        """Of a rank on another machine: the part is written here and put where rank 0 waits for it."""
        own = leader.scratch / save.partial.name
        try:
            write_rank_part(own, self._rank, part)
            leader.put(self._token, save.partial.name, part_files(own, self._rank))
        finally:
            shutil.rmtree(own, ignore_errors=True)

    def _give_up(self, save: _Save, reason: str) -> None:
        """Remove what was written, tell the other ranks why, and the user once: through rank 0 where it can be told."""
        if self._leader is not None:
            if self._closing.is_set():
                return  # rank 0 ends as well, and the network may be what has failed
            try:
                self._leader.give_up(self._token, save.partial.name, self._rank, reason)
            except RefusedError:
                pass  # rank 0 has ended its saves
            except WireError:
                what = f"checkpoint {save.folder} is not saved: {reason}, on {self._place}"
                self._note(f"{what}; training is not affected")
            return
        mark = failure_mark(save.partial)
        is_told = mark.exists()
        if is_told:
            reason = read_mark(mark) or reason
        else:
            leave_mark(mark, f"{reason}, on {self._place}", str(self._rank))
            is_told = mark.exists()
        shutil.rmtree(save.partial, ignore_errors=True)
        if self._rank == 0 or not is_told:
            self._note(self._failure_line(save, reason))

    @property
    def _place(self) -> str:
        return self._places[self._rank]

    def _failure_line(self, save: _Save, reason: str) -> str:
        parent = save.folder.parent
        while not parent.exists() and parent != parent.parent:
            parent = parent.parent
        free = shutil.disk_usage(parent).free
        last = next((folder for folder in find_checkpoints(save.folder.parent) if _seems_whole(folder)), None)
        state = "there is no whole checkpoint yet" if last is None else f"the last whole checkpoint is {last}"
        return (
            f"checkpoint {save.folder} is not saved: {reason}; it needs about {save.needed / 1e6:,.1f} MB and "
            f"{free / 1e6:,.1f} MB are free in {parent}; training is not affected, {state}"
        )

    def _note(self, line: str) -> None:
        with self._lock:
            self.notes.append(line)


def _reason(error: Exception) -> str:
    """What went wrong, in one line."""
    if isinstance(error, OSError):
        where = f" ({Path(error.filename).name})" if isinstance(error.filename, str) else ""
        return why_not_written(error) + where
    if isinstance(error, SaveGivenUpError | InputError):
        return str(error)
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _bytes_in(folder: Path) -> int:
    total = 0
    for entry in folder.iterdir() if folder.is_dir() else ():
        with suppress(OSError):  # renamed meanwhile
            total += entry.stat().st_size
    return total


def _seems_whole(folder: Path) -> bool:
    """Without its checksums, which a failing disk should not be asked for."""
    try:
        return has_all_files(folder, read_record(folder))
    except (InputError, OSError):
        return False
