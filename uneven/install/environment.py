"""A Python environment that packages are installed into: what it is, and the command that installs into it.

Used by `uneven setup` for the environment it runs in, and by `uneven torch` for environments of its own.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from uneven.errors import MachineError
from uneven.install.ending import sigterm_raises

_LAST_LINES = 12  # of a failed installation, in the error

# Run isolated: PYTHONPATH and the folder we are in must not change what the environment says of itself.
_ASK = """\
import json, os, sys, sysconfig
stdlib = sysconfig.get_path("stdlib")
print(json.dumps({
    "prefix": sys.prefix,
    "base_prefix": sys.base_prefix,
    "version": sys.version.split()[0],
    "purelib": sysconfig.get_path("purelib"),
    "managed": bool(stdlib) and os.path.isfile(os.path.join(stdlib, "EXTERNALLY-MANAGED")),
}))
"""


@dataclass(frozen=True)
class Environment:
    """The environment of one Python executable, which is not followed through links: .venv/bin/python is one."""

    python: Path

    @cached_property
    def _facts(self) -> dict[str, Any]:
        try:
            command = [str(self.python), "-I", "-c", _ASK]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
            facts: dict[str, Any] = json.loads(done.stdout)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            raise MachineError(f"{self.python} does not run as a Python: {error}") from error
        return facts

    @property
    def prefix(self) -> Path:
        """The folder of the environment, such as .venv."""
        return Path(self._facts["prefix"])

    @property
    def version(self) -> str:
        """Of Python, such as 3.11.7."""
        return str(self._facts["version"])

    @property
    def is_virtual(self) -> bool:
        """Whether it is a virtual environment (venv, virtualenv, uv, pipx) or one of conda."""
        return bool(self._facts["prefix"] != self._facts["base_prefix"]) or (self.prefix / "conda-meta").is_dir()

    @property
    def is_managed(self) -> bool:
        """Whether the operating system manages it and pip must leave it alone (PEP 668); never a virtual one."""
        return bool(self._facts["managed"]) and not self.is_virtual

    @property
    def is_of_uv(self) -> bool:
        """Whether uv made it: such an environment usually has no pip."""
        try:
            lines = (self.prefix / "pyvenv.cfg").read_text(errors="replace").splitlines()
        except OSError:
            return False
        return any(line.partition("=")[0].strip() == "uv" for line in lines)

    @property
    def has_pip(self) -> bool:
        return (Path(self._facts["purelib"]) / "pip").is_dir() or self._imports_pip()

    def _imports_pip(self) -> bool:
        # Debian keeps pip in dist-packages, and a venv with system packages has it from below.
        done = subprocess.run([str(self.python), "-c", "import pip"], capture_output=True, check=False)
        return done.returncode == 0

    @cached_property
    def size(self) -> int:
        """Bytes of its folder on disk; a file that is linked twice counts once, a soft link not at all."""
        return folder_size(self.prefix)


def current() -> Environment:
    """The environment of this process."""
    return Environment(Path(sys.executable))


def folder_size(folder: Path) -> int:
    """Bytes of all files below `folder`; hard links count once, soft links not at all."""
    total, seen = 0, set()
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                info = os.lstat(os.path.join(parent, name))
            except OSError:  # removed meanwhile
                continue
            if info.st_nlink > 1:
                if (info.st_dev, info.st_ino) in seen:
                    continue
                seen.add((info.st_dev, info.st_ino))
            if not os.path.islink(os.path.join(parent, name)):
                total += info.st_size
    return total


def refuse_shared(environment: Environment) -> None:
    """MachineError if others use this environment, too: the operating system, or every program of this Python."""
    own = "python3 -m venv .venv && .venv/bin/pip install uneven && .venv/bin/uneven setup"
    if environment.is_managed:
        raise MachineError(
            f"the operating system manages the Python in {environment.prefix} (PEP 668) and may break by what is "
            f"installed there; run: {own}  (or, at your own risk, add --system)"
        )
    if not environment.is_virtual:
        raise MachineError(
            f"{environment.prefix} is not a virtual environment: all programs of this Python would get this torch; "
            f"run: {own}  (or, if that is meant, add --system)"
        )


def pip_command(
    python: Path, packages: Sequence[str], index_url: str | None = None, reinstall: bool = False
) -> list[str]:
    """The command that installs `packages` into the environment of `python`: `uv pip` where uv made it, else pip.

    `reinstall` replaces a torch that satisfies the version but is another build: 2.13.0+cpu satisfies torch>=2.9.
    In an environment that the operating system manages it overrules that: `refuse_shared` has to come before it.
    MachineError where there is neither.
    """
    environment = Environment(python)
    uv = shutil.which("uv")
    index = ["--index-url", index_url] if index_url else []
    if uv is not None and (environment.is_of_uv or not environment.has_pip):
        again = ["--reinstall-package", "torch"] if reinstall else []
        again += ["--break-system-packages"] if environment.is_managed else []
        return [uv, "pip", "install", "--python", str(python), *again, *packages, *index]
    if not environment.has_pip:
        raise MachineError(
            f"{environment.prefix} has no pip and uv is not on the PATH; "
            f"run: {shlex.quote(str(python))} -m ensurepip --upgrade"
        )
    again = ["--force-reinstall"] if reinstall else []
    again += ["--break-system-packages"] if environment.is_managed else []
    quiet = ["--disable-pip-version-check", "--no-input"]
    return [str(python), "-m", "pip", "install", *quiet, *again, *packages, *index]


def install(command: Sequence[str], say: Callable[[str], None]) -> None:
    """Run a command of `pip_command` and give each line of its output to `say`; MachineError with the last lines.

    However this ends, also by Ctrl-C or SIGTERM, the command has ended with it: a pip that went on alone would change
    an environment that nobody watches any more.
    """
    last: deque[str] = deque(maxlen=_LAST_LINES)
    with sigterm_raises():
        try:
            # Its output is read as it comes: a torch with CUDA is gigabytes, and minutes of silence look like a hang.
            child = subprocess.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        except OSError as error:
            raise MachineError(f"cannot start {command[0]}: {error}") from error
        assert child.stdout is not None
        try:
            with child.stdout:
                for line in child.stdout:
                    last.append(line.rstrip())
                    say(line.rstrip())
            code = child.wait()
        except BaseException:  # Ctrl-C: the child has had it too, or gets the end of it here; SIGTERM: we alone
            child.terminate()
            child.wait()
            raise
    if code != 0:
        tail = "\n".join(f"  {line}" for line in last if line)
        raise MachineError(f"the installation failed (exit code {code}): {shlex.join(command)}\n{tail}")
