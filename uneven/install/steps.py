"""Commands that install: pip's or uv's, and how one is run with its output shown, ended with us whatever happens."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from uneven.errors import MachineError, Terminated

INDEX = "https://download.pytorch.org/whl/"  # PyTorch's own indexes of wheels, one for each tag
_LAST_LINES = 12  # of a failed command, in the error
_END_S = 10.0


@dataclass(frozen=True)
class Step:
    """One command, which may be repeated after an interruption; `path` are folders before those of PATH."""

    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    path: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """As one would type it in a shell."""
        variables = [f"{key}={shlex.quote(value)}" for key, value in self.environment.items()]
        path = [f"PATH={':'.join(map(shlex.quote, self.path))}:$PATH"] if self.path else []
        return " ".join([*path, *variables, shlex.join(self.command)])


def python_of(folder: Path) -> Path:
    """The Python of an environment; not resolved, since the link itself is what makes it that environment's."""
    return folder / "bin" / "python"


def environment_step(folder: Path) -> Step:
    """Makes a virtual environment of this Python, by uv where it is there; one that is there is kept."""
    uv = shutil.which("uv")
    if uv is not None:
        return Step((uv, "venv", "--seed", "--allow-existing", "--python", sys.executable, str(folder)))
    return Step((sys.executable, "-m", "venv", str(folder)))


def install_step(
    python: Path,
    packages: Sequence[str],
    tag: str | None = None,
    index_url: str | None = None,
    reinstall: bool = False,
) -> Step:
    """Installs into the environment of `python`: by uv where it is there, else by pip. `tag` is a build of torch.

    `reinstall` replaces a torch that satisfies the version but is another build: 2.13.0+cpu satisfies torch>=2.9.
    Both refuse a Python that the operating system manages (PEP 668).
    """
    uv = shutil.which("uv")
    index = ["--index-url", index_url] if index_url else []
    if uv is not None:
        backend = ["--torch-backend", tag] if tag and not index else []
        again = ["--reinstall-package", "torch"] if reinstall else []
        return Step((uv, "pip", "install", "--python", str(python), *again, *backend, *packages, *index))
    index = index or (["--index-url", INDEX + tag] if tag else [])
    again = ["--force-reinstall"] if reinstall else []
    quiet = ["--disable-pip-version-check", "--no-input"]
    return Step((str(python), "-m", "pip", "install", *quiet, *again, *packages, *index))


def run_step(step: Step, say: Callable[[str], None], log: Path | None = None, every_s: float = 0.0) -> None:
    """Run a command; MachineError with its last lines where it fails.

    Its output goes to `log` and, at most once in `every_s` seconds, to `say`: a torch with CUDA is gigabytes, and
    minutes of silence look like a hang. However this ends, also by Ctrl-C or SIGTERM, the command and its children have
    ended with it: a pip that went on alone would change an environment that nobody watches any more.
    """
    last: deque[str] = deque(maxlen=_LAST_LINES)
    path = os.pathsep.join([*step.path, os.environ.get("PATH", os.defpath)])
    with _sigterm_raises(), log.open("a") if log is not None else nullcontext() as output:
        said_s = time.monotonic()
        try:
            child = subprocess.Popen(
                step.command,
                env={**os.environ, **step.environment, "PATH": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C reaches us alone, and we end compilers and their children together
            )
        except OSError as error:
            raise MachineError(f"cannot start {step.command[0]}: {error}") from error
        assert child.stdout is not None
        try:
            for line in child.stdout:
                last.append(line.rstrip())
                if output is not None:
                    output.write(line)
                if time.monotonic() - said_s >= every_s:
                    said_s = time.monotonic()
                    say(line.rstrip())
            code = child.wait()
        finally:
            _end_group(child)
            child.stdout.close()
    if code != 0:
        tail = "\n".join(f"  {line}" for line in last if line)
        why = " (out of memory? fewer --jobs)" if code == -signal.SIGKILL else ""
        where = f"; all output is in {log}" if log is not None else ""
        raise MachineError(f"this failed with exit code {code}{why}{where}: {step.line}\n{tail}")


def _end_group(child: "subprocess.Popen[str]") -> None:
    """End all processes of a command that was interrupted; nothing where it has ended by itself."""
    if child.poll() is not None:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):  # the second for what did not end with the first process
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(_END_S)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM unwinds by Terminated; only the main thread may set handlers of signals, so in others nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: Any) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
