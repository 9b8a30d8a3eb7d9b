"""The supervisor process of an MPS daemon: `python -m uneven.hardware.mps_supervisor LAUNCHER_PID`, started by mps.py.

It starts the daemon, reports that in one line of JSON, waits until the launcher closes the pipe or has died, and ends
the daemon: with `quit`, else by signals to its pids. Invariant: when the supervisor has ended, no process and no
folder of its daemon is left. If a supervisor was killed, the next one removes its daemon.
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
# Not TMPDIR, which may be long: the daemon puts sockets there, whose paths are limited to about 100 characters.
PARENT_FOLDERS = (Path("/dev/shm"), Path("/tmp"))

START_S = 20.0
QUIT_S = 5.0  # the daemon first has to notice that killed clients are gone
GONE_S = 2.0  # from a signal or the end of `quit` until the processes have ended
END_S = QUIT_S + 3 * GONE_S + 5.0  # for the whole shutdown
PARENT_CHECK_S = 0.25
POLL_S = 0.02


def daemon_variables(home: Path) -> dict[str, str]:
    """The environment variables that connect a process to the daemon of this folder."""
    return {PIPES: str(home / "pipe"), LOGS: str(home / "log")}


def start_daemon(home: Path) -> str | None:
    """Start the daemon of this folder; None once it listens, else the reason why it does not."""
    program = shutil.which(CONTROL)
    if program is None:
        return f"{CONTROL} is not on PATH"
    end_s = time.monotonic() + START_S
    try:
        # Output goes to a file, because the daemon may hold a pipe open until it ends.
        with (home / "log" / "start.log").open("wb") as start_log:
            code = subprocess.run(
                [program, "-d"],
                env=_environment(home),
                stdin=subprocess.DEVNULL,
                stdout=start_log,
                stderr=subprocess.STDOUT,
                timeout=START_S,
                check=False,
            ).returncode
    except subprocess.TimeoutExpired:
        return f"'{CONTROL} -d' did not return within {START_S:g} s"
    except OSError as error:
        return str(error)
    if code != 0:
        return last_log_line(home, "start.log", "control.log") or f"'{CONTROL} -d' ended with exit code {code}"
    while not (home / "pipe" / "control").exists():
        if time.monotonic() > end_s:
            line = last_log_line(home, "control.log", "start.log")
            return f"it does not listen after {START_S:g} s" + (f" ({line})" if line else "")
        time.sleep(POLL_S)
    return None


def end_daemon(home: Path) -> None:
    """End all processes of this folder's daemon and delete the folder; returns at once if none is running."""
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
    is_gone = _wait_until_gone(home)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if is_gone:
            break
        for pid in processes_of(home):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        is_gone = _wait_until_gone(home)
    shutil.rmtree(home, ignore_errors=True)


def processes_of(home: Path) -> list[int]:
    """The pids of the daemon and its servers, found by process name and by the folder in their environment."""
    marker = f"{PIPES}={home / 'pipe'}".encode()
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # The kernel cuts names to 15 characters. The name is compared because ranks have the same variable.
            if not (process / "comm").read_bytes().startswith(CONTROL[:15].encode()):
                continue
            if marker in (process / "environ").read_bytes().split(b"\0"):
                pids.append(int(process.name))
    return pids


def last_log_line(home: Path, *logs: str) -> str:
    """The last line of the first of these logs that is not empty, or ""."""
    for name in logs:
        with suppress(OSError):
            lines = (home / "log" / name).read_text(errors="replace").split("\n")
            messages = [line.strip() for line in lines if line.strip()]
            if messages:
                return messages[-1]
    return ""


def remove_orphans() -> None:
    """End the daemons of this user whose supervisor was killed, and delete their folders."""
    for home in (home for place in PARENT_FOLDERS for home in place.glob("uneven-mps-*")):
        with suppress(OSError):
            if home.lstat().st_uid != os.getuid():
                continue
            with (home / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while the supervisor is alive
                end_daemon(home)


def supervise(launcher: int) -> None:
    """Run the daemon from its start until the launcher closes the pipe or dies."""
    # SIGTERM must run the `finally` below, which ends the daemon.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    remove_orphans()
    home, lock = _make_home(launcher)
    try:
        error = start_daemon(home)
        with suppress(BrokenPipeError):
            print(json.dumps({"home": str(home), "error": error}), flush=True)
        while error is None and os.getppid() == launcher:
            # The pipe reports a closed launcher at once, but a fork of the launcher may hold it open and outlive it.
            if select.select([sys.stdin], [], [], PARENT_CHECK_S)[0]:
                break
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_daemon(home)
        lock.close()


def _make_home(launcher: int) -> tuple[Path, IO[str]]:
    """A folder only this user can read, and the lock in it that is held while its supervisor is alive."""
    place = next((place for place in PARENT_FOLDERS if os.access(place, os.W_OK)), Path(tempfile.gettempdir()))
    home = Path(tempfile.mkdtemp(prefix=f"uneven-mps-{launcher}-", dir=place))
    (home / "pipe").mkdir()
    (home / "log").mkdir()
    lock = (home / "new").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    (home / "new").rename(home / "lock")  # remove_orphans() must never see a lock that is not held yet
    return home, lock


def _environment(home: Path) -> dict[str, str]:
    """The daemon's environment, without the user's MPS variables: a percentage would be the limit of every slice."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_MPS_")}
    return kept | daemon_variables(home)


def _wait_until_gone(home: Path) -> bool:
    """Wait up to GONE_S for the daemon's processes to end; whether they did."""
    end_s = time.monotonic() + GONE_S
    while processes_of(home):
        if time.monotonic() > end_s:
            return False
        time.sleep(POLL_S)
    return True


if __name__ == "__main__":
    supervise(int(sys.argv[1]))
