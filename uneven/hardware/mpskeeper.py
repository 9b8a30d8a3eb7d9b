"""The keeper of an MPS daemon: `python -m uneven.hardware.mpskeeper LAUNCHER`, a process between it and the launcher.

It starts the daemon, says so in one line of JSON, waits until the launcher closes the pipe or is gone, and ends the
daemon: by its own `quit`, else by its pids. Invariant: when the keeper has ended, no process of its daemon and no
folder is left; what a keeper that was killed left behind, the next one sweeps away.
"""

import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

CONTROL = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
LOGS = "CUDA_MPS_LOG_DIRECTORY"
# Not TMPDIR: the daemon's sockets lie there, whose paths may have some 100 characters.
PLACES = (Path("/dev/shm"), Path("/tmp"))

START_S = 20.0
QUIT_S = 5.0  # clients that were killed a moment ago have to be noticed
GONE_S = 2.0  # between a signal, or the end of `quit`, and the end of the processes
END_S = QUIT_S + 3 * GONE_S + 5.0  # for all of it
LOOK_EVERY_S = 0.25
POLL_S = 0.02


def variables(home: Path) -> dict[str, str]:
    """What leads a process to the daemon of this folder."""
    return {PIPES: str(home / "pipe"), LOGS: str(home / "log")}


def start_daemon(home: Path) -> str | None:
    """None once it listens, else the reason why it does not."""
    program = shutil.which(CONTROL)
    if program is None:
        return f"{CONTROL} is not on PATH"
    end_s = time.monotonic() + START_S
    try:
        # Into a file: the daemon may keep a pipe open for as long as it lives.
        with (home / "log" / "start.log").open("wb") as said:
            code = subprocess.run(
                [program, "-d"],
                env=_environment(home),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                timeout=START_S,
                check=False,
            ).returncode
    except subprocess.TimeoutExpired:
        return f"'{CONTROL} -d' did not return within {START_S:g} s"
    except OSError as error:
        return str(error)
    if code != 0:
        return last_words(home, "start.log", "control.log") or f"'{CONTROL} -d' ended with exit code {code}"
    while not (home / "pipe" / "control").exists():
        if time.monotonic() > end_s:
            words = last_words(home, "control.log", "start.log")
            return f"it does not listen after {START_S:g} s" + (f" ({words})" if words else "")
        time.sleep(POLL_S)
    return None


def end_daemon(home: Path) -> None:
    """No process of this folder's daemon, and no folder; at once where there is none."""
    program = shutil.which(CONTROL)
    if program is not None and processes_of(home):
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                [program],
                input=b"quit\n",
                env=_environment(home),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=QUIT_S,
                check=False,
            )
    is_gone = _is_gone(home)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if is_gone:
            break
        for pid in processes_of(home):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        is_gone = _is_gone(home)
    shutil.rmtree(home, ignore_errors=True)


def processes_of(home: Path) -> list[int]:
    """The daemon and the servers it has started, by what they are called and by the folder they were given."""
    ours = f"{PIPES}={home / 'pipe'}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # The kernel cuts names to 15 characters. The ranks have the same folder in their environment.
            if not (process / "comm").read_bytes().startswith(CONTROL[:15].encode()):
                continue
            if ours in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


def last_words(home: Path, *logs: str) -> str:
    """The last line of the first of these logs that has one; else nothing."""
    for name in logs:
        with suppress(OSError):
            lines = (home / "log" / name).read_text(errors="replace").split("\n")
            words = [line.strip() for line in lines if line.strip()]
            if words:
                return words[-1]
    return ""


def sweep() -> None:
    """End the daemons of this user whose keeper was killed, and remove their folders."""
    for home in (home for place in PLACES for home in place.glob("uneven-mps-*")):
        with suppress(OSError):
            if home.lstat().st_uid != os.getuid():
                continue
            with (home / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its keeper lives
                end_daemon(home)


def keep(launcher: int) -> None:
    """From the daemon's start to its end."""
    # Whoever ends the keeper ends the daemon first.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sweep()
    home, lock = _make_home(launcher)
    try:
        error = start_daemon(home)
        with suppress(BrokenPipeError):
            print(json.dumps({"home": str(home), "error": error}), flush=True)
        while error is None and os.getppid() == launcher:
            # The pipe says it at once; but a fork of the launcher may hold it open and outlive it.
            if select.select([sys.stdin], [], [], LOOK_EVERY_S)[0]:
                break
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_daemon(home)
        lock.close()


def _make_home(launcher: int) -> tuple[Path, IO[str]]:
    """A folder only this user can read, and the lock on it that says that its keeper lives."""
    place = next((place for place in PLACES if os.access(place, os.W_OK)), Path(tempfile.gettempdir()))
    home = Path(tempfile.mkdtemp(prefix=f"uneven-mps-{launcher}-", dir=place))
    (home / "pipe").mkdir()
    (home / "log").mkdir()
    lock = (home / "new").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    (home / "new").rename(home / "lock")  # never seen by a sweep while it is not held
    return home, lock


def _environment(home: Path) -> dict[str, str]:
    """The daemon's: a percentage of the user's in it would be the most that any slice may have."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_MPS_")}
    return kept | variables(home)


def _is_gone(home: Path) -> bool:
    """Whether the processes end within a moment."""
    end_s = time.monotonic() + GONE_S
    while processes_of(home):
        if time.monotonic() > end_s:
            return False
        time.sleep(POLL_S)
    return True


if __name__ == "__main__":
    keep(int(sys.argv[1]))
