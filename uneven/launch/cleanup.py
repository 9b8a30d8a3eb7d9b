"""What a run must not leave behind: its private folder and its rank processes, whoever dies first.

The launcher removes both when the run ends, and before it is cut short (`leave_nothing`). When the launcher itself is
killed, the ranks notice within a second and do it; what even they could not do (all of them stopped), the next launch
does (`sweep`). A folder's name says which process made it.
"""

import os
import re
import shutil
import signal
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
LOOK_EVERY_S = 0.25
_NAME = re.compile(r"uneven-(\d+)-(\d+)-")

_live: set[Path] = set()  # the folders of this process's runs


def make_private_folder() -> Path:
    """A folder only this user can read, in shared memory where there is room; `remove` it in the end."""
    roomy = (
        SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free > 1 << 30
    )
    home = SHARED_MEMORY if roomy else Path(tempfile.gettempdir())
    sweep(home)
    folder = Path(tempfile.mkdtemp(prefix=f"uneven-{_process_space()}-{os.getpid()}-", dir=home))
    _live.add(folder)
    return folder


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _live.discard(folder)


def record_pid(folder: Path, rank: int) -> None:
    """Called by a rank as its first act: so that it can be found when the launcher cannot say any more."""
    (folder / f"pid-{rank}").write_text(str(os.getpid()))


def end_all_runs() -> None:
    """End every rank of this process's runs and remove their folders: for an end without ceremony."""
    for folder in tuple(_live):
        _end_ranks(folder)
        remove(folder)


def end_orphaned_run(folder: Path) -> None:
    """In a rank whose launcher is gone: end the other ranks, remove the folder, end."""
    _end_ranks(folder)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def guard(folder: Path, launcher: int) -> None:
    """In a rank, from its first moment on: a thread that sees the launcher's end."""

    def look() -> None:
        pause = threading.Event()
        while os.getppid() == launcher:
            pause.wait(LOOK_EVERY_S)
        end_orphaned_run(folder)

    threading.Thread(target=look, name="uneven-guard", daemon=True).start()


def sweep(home: Path) -> None:
    """Remove what runs of this user left whose launcher was killed, ranks that are still stopped included."""
    for folder in home.glob("uneven-*"):
        made = _NAME.match(folder.name)
        # Another container may share the folder but not our process numbers: its runs are not ours to judge.
        if made is None or int(made[1]) != _process_space():
            continue
        with suppress(OSError):
            if folder.stat().st_uid == os.getuid() and not _is_alive(int(made[2])):
                _end_ranks(folder)
                shutil.rmtree(folder, ignore_errors=True)


def _end_ranks(folder: Path) -> None:
    for path in folder.glob("pid-*"):
        with suppress(OSError, ValueError):
            pid = int(path.read_text())
            # The number may have gone to another process since; a rank has the folder in its command.
            if pid != os.getpid() and str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.killpg(pid, signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _process_space() -> int:
    """Which numbering of processes ours is; 0 where there is only one."""
    try:
        return int(re.sub(r"\D", "", os.readlink("/proc/self/ns/pid")))
    except (OSError, ValueError):
        return 0
