"""Cleanup: a run leaves neither its private folder nor a rank process behind, whoever dies first.

The launcher removes both when the run ends, and before it is cut short (`end_all_runs`). When the launcher itself is
killed, its ranks are orphans: they notice within a second and do it (`end_orphaned_run`). What even they could not do
(all of them stopped), the next launch does (`remove_stale_runs`). A folder's name holds the pid of its launcher.
"""

import fcntl
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from uneven.errors import MachineError
from uneven.files import temporary_folder
from uneven.machines.transfer import LeaderFiles

SHARED_MEMORY = Path("/dev/shm")
POLL_S = 0.25
ORPHANED_S = 1.5  # in which a rank whose launcher is gone has ended
TRACKER = b"multiprocessing.resource_tracker"
_NAME = re.compile(r"uneven-(\d+)-(\d+)-")

_live: set[Path] = set()  # the folders of this process's runs


def make_private_folder(is_on_disk: bool = False) -> Path:
    """A folder only this user can read, in shared memory where there is room; `remove` it in the end.

    With `is_on_disk` it is for files that may be larger than memory, such as those of a checkpoint.
    """
    has_room = (
        SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free > 1 << 30
    )
    home = SHARED_MEMORY if has_room and not is_on_disk else temporary_folder()
    remove_stale_runs(home)
    folder = Path(tempfile.mkdtemp(prefix=f"uneven-{pid_namespace()}-{os.getpid()}-", dir=home))
    _live.add(folder)
    return folder


def reach_leader(door: tuple[str, int, str] | None) -> LeaderFiles | None:
    """The leader's file service, where this run has a leader; copies of its files go to a private folder."""
    return None if door is None else LeaderFiles(door, lambda: make_private_folder(is_on_disk=True), remove)


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _live.discard(folder)


def remove_left_on_disk() -> None:
    """What ranks of this machine had there of checkpoints and could not remove, since they failed or were ended."""
    with suppress(MachineError):
        remove_stale_runs(temporary_folder())


def record_pid(folder: Path, number: int) -> None:
    """Called by a rank first of all: the process can then be found without its launcher."""
    (folder / f"pid-{number}").write_text(str(os.getpid()))


def end_all_runs() -> None:
    """End every rank of this process's runs and remove their folders: before an os._exit."""
    for folder in tuple(_live):
        _end_ranks(folder)
        remove(folder)


def end_orphaned_run(folder: Path) -> None:
    """In a rank whose launcher is gone: end the other ranks, remove the folder, end this process."""
    # One rank alone: two that ended each other at the same moment left the folder. The lock ends with the process, so
    # that the next rank does it where this one is ended meanwhile.
    with suppress(OSError):
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)
    _end_ranks(folder)
    shutil.rmtree(folder, ignore_errors=True)
    for own in tuple(_live):
        remove(own)
    os._exit(1)


def end_rank(folder: Path, launcher_pid: int, code: int) -> NoReturn:
    """End this rank's process, and where its launcher is gone the run on this machine with it.

    A rank that loses its group with the launcher's machine ends before the thread of `watch_launcher` looks again, and
    the folder stayed.
    """
    if os.getppid() != launcher_pid:
        end_orphaned_run(folder)
    os._exit(code)


def end_cut_off_rank(report: Callable[[BaseException], None]) -> None:
    """In a rank that does not reach its launcher's store: the launcher is gone, or this rank alone is cut off from it.

    In the first case the thread of `watch_launcher` ends the run. In the second this process alone ends, and the others
    go on: it had ended them, too, and removed their folder (`uneven chaos --cut`).
    """
    time.sleep(ORPHANED_S)
    report(ConnectionError("its connection to the launcher is lost"))
    os._exit(1)


def watch_launcher(folder: Path, launcher_pid: int) -> None:
    """In a rank, as early as possible: a thread that ends the run when the launcher's process is gone."""

    def watch() -> None:
        pause = threading.Event()
        while os.getppid() == launcher_pid:
            pause.wait(POLL_S)
        end_orphaned_run(folder)

    threading.Thread(target=watch, name="uneven-launcher-watch", daemon=True).start()


def remove_stale_runs(home: Path) -> None:
    """Remove folders of this user's runs whose launcher was killed, and their ranks that are still stopped."""
    for folder in home.glob("uneven-*"):
        name = _NAME.match(folder.name)
        # A container may share the folder but not our pids: whether its launchers live cannot be known here.
        if name is None or int(name[1]) != pid_namespace():
            continue
        with suppress(OSError):
            if folder.stat().st_uid == os.getuid() and not _is_alive(int(name[2])):
                _end_ranks(folder)
                shutil.rmtree(folder, ignore_errors=True)


def live_folders() -> list[tuple[Path, int]]:
    """The private folders of this user's processes that live, on this machine, with the process of each."""
    found = []
    for home in {SHARED_MEMORY, temporary_folder()}:
        for folder in home.glob("uneven-*"):
            name = _NAME.match(folder.name)
            with suppress(OSError):
                if name is None or int(name[1]) != pid_namespace() or folder.stat().st_uid != os.getuid():
                    continue
                if _is_alive(pid := int(name[2])):
                    found.append((folder, pid))
    return found


def process_start(pid: int) -> str | None:
    """When a process was started, as the kernel counts; with its pid it names one process for ever."""
    return _stat_field(pid, 19)


def process_state(pid: int) -> str | None:
    """One letter, as `ps` shows it: T is stopped by a signal."""
    return _stat_field(pid, 0)


def _stat_field(pid: int, place: int) -> str | None:
    """Of those behind the process's name, which may hold blanks and brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[place]
    except (OSError, IndexError):
        return None


def end_session(pid: int) -> None:
    """SIGKILL to the processes of a rank's group, also where they are stopped; the rank itself may have ended.

    All but the tracker of multiprocessing: it removes the semaphores of the rank's loader processes, which are files in
    shared memory, when the last of them is gone, and ends. Killed with them it left them there.
    """
    ended: set[int] = set()
    while found := {one for one in _members(pid) if one not in ended}:  # one of them may have started another
        for one in found:
            with suppress(OSError):
                tracks = TRACKER in Path(f"/proc/{one}/cmdline").read_bytes()
                os.kill(one, signal.SIGCONT if tracks else signal.SIGKILL)
        ended |= found


def _members(group: int) -> list[int]:
    """The processes of a process group that live."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, of, *_ = path.read_text().rpartition(")")[2].split()
            if int(of) == group and state not in "ZX":
                found.append(int(path.parent.name))
    return found


def _end_ranks(folder: Path) -> None:
    for path in folder.glob("pid-*"):
        with suppress(OSError, ValueError):
            pid = int(path.read_text())
            # The pid may belong to another process by now; a rank has the folder in its command line.
            if pid != os.getpid() and str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                end_session(pid)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def pid_namespace() -> int:
    """The number of our pid namespace; 0 where the system has none."""
    try:
        return int(re.sub(r"\D", "", os.readlink("/proc/self/ns/pid")))
    except (OSError, ValueError):
        return 0
