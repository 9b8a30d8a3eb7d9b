"""Long work as named steps that survive an interruption: a state file of what is done, and a log of all output.

Every step may be repeated: one that was interrupted runs again from its start, and tools such as git, pip and ninja go
on from what they have. A step counts as done with a digest of its command and environment; where that has changed, it
and all later ones run again. Used by source_build.py; tests run tiny steps.
"""

import hashlib
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from uneven.files import read_json, write_atomically
from uneven.install.ending import sigterm_raises

_VOLATILE = ("MAX_JOBS",)  # how fast, not what: another value does not make a finished step wrong
_TELL_EVERY = 30.0  # seconds between two lines about a step that runs
_LAST_LINES = 12


class StepError(RuntimeError):
    """A step failed; the message names it, its log and its last lines."""

    exit_code = 1


@dataclass(frozen=True)
class Step:
    """One command; `environment` is added to the caller's, and `path` are folders before those of its PATH."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    path: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        kept = {key: value for key, value in sorted(self.environment.items()) if key not in _VOLATILE}
        text = json.dumps([self.command, kept, self.path])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def line(self) -> str:
        """As one would type it in a shell."""
        variables = [f"{key}={shlex.quote(value)}" for key, value in self.environment.items()]
        path = [f"PATH={':'.join(map(shlex.quote, self.path))}:$PATH"] if self.path else []
        return " ".join([*path, *variables, shlex.join(self.command)])


def done_steps(steps: Sequence[Step], state: Path) -> int:
    """How many of the first steps are done, as they are now."""
    found = read_json(state)
    digests = found.get("done", []) if isinstance(found, dict) else []
    for number, (step, digest) in enumerate(zip(steps, digests, strict=False)):
        if step.digest != digest:
            return number
    return min(len(steps), len(digests))


def run_steps(steps: Sequence[Step], state: Path, log: Path, say: Callable[[str], None]) -> None:
    """Run what is not done yet, in order; StepError where one fails. State and log are in folders that exist."""
    done = done_steps(steps, state)
    if done:
        say(f"goes on after {done} of {len(steps)} steps")
    with log.open("ab") as output, sigterm_raises():
        for number, step in enumerate(steps[done:], start=done + 1):
            say(f"step {number} of {len(steps)}: {step.name}")
            output.write(f"\n$ {step.line}\n".encode())
            output.flush()
            start = time.monotonic()
            code = _run_step(step, output, log, say)
            if code != 0:
                raise StepError(_failure(step, code, log))
            _write_state(state, [one.digest for one in steps[:number]])
            say(f"step {number} of {len(steps)}: {step.name} done ({_duration(time.monotonic() - start)})")


def _run_step(step: Step, output: IO[bytes], log: Path, say: Callable[[str], None]) -> int:
    path = os.pathsep.join([*step.path, os.environ.get("PATH", os.defpath)])
    environment = {**os.environ, **step.environment, "PATH": path}
    try:
        # A session of its own: Ctrl-C reaches us alone, and we end compilers and their children together.
        child = subprocess.Popen(
            step.command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        output.write(f"{step.command[0]}: {error.strerror}\n".encode())
        return 127
    start = time.monotonic()
    try:
        while (code := _wait(child, _TELL_EVERY)) is None:
            last = (_last_lines(log, 1) or [""])[-1][:100]
            say(f"  {step.name}, {_duration(time.monotonic() - start)}: {last}")
        return code
    finally:
        _end_group(child)


def _wait(child: "subprocess.Popen[bytes]", seconds: float) -> int | None:
    """The exit code, or None if it still runs after these seconds."""
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _end_group(child: "subprocess.Popen[bytes]") -> None:
    """End all processes of a step that was interrupted; nothing where it has ended by itself."""
    if child.poll() is not None:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):  # the second for what did not end with the first process
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
        _wait(child, 10.0)


def _write_state(state: Path, digests: list[str]) -> None:
    write_atomically(state, json.dumps({"done": digests}).encode())


def _failure(step: Step, code: int, log: Path) -> str:
    tail = "\n".join(f"  {line}" for line in _last_lines(log, _LAST_LINES))
    how = f"was ended by signal {-code}" if code < 0 else f"failed with exit code {code}"
    why = " (out of memory? fewer --jobs)" if code == -signal.SIGKILL else ""
    return f"step {step.name!r} {how}{why}; all output is in {log}\n{tail}"


def _last_lines(log: Path, count: int) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 8192))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-count:]


def _duration(seconds: float) -> str:
    minutes = int(seconds / 60)
    return f"{seconds:.0f} s" if minutes < 1 else f"{minutes} min" if minutes < 60 else f"{minutes / 60:.1f} h"
