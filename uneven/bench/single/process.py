"""Runs the `uneven` command in a fresh process, for measurements that must not depend on earlier ones.

Used by sweeps, scaling and policies. The process ends with this one (launch/lifeline.py).
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from uneven.errors import STOPPED, TERMINATED
from uneven.launch.lifeline import LIFELINE

END_S = 10.0  # given to a run to save and exit after Ctrl-C
POLL_S = 0.1


@dataclass(frozen=True)
class Ended:
    """A process that has ended, with its output."""

    code: int
    stdout: str
    stderr: str

    @property
    def message(self) -> str:
        """The reason of a failure: the one-line message of `uneven`, or the last line of a traceback."""
        lines = [line for line in self.stderr.strip().splitlines() if line.strip()]
        ours = [line for line in lines if line.startswith("uneven: ")]
        return (ours or lines or [f"ended with exit code {self.code} and no message"])[-1].removeprefix("uneven: ")


def run_uneven(arguments: Sequence[str], cores: Sequence[int] | None = None) -> Ended:
    """Run `uneven` with these arguments, pinned to `cores`; KeyboardInterrupt also if the run was interrupted."""
    ((_, ended),) = run_many([arguments], cores=cores)
    return ended


def run_many(
    commands: Iterable[Sequence[str]],
    at_once: int = 1,
    cores: Sequence[int] | None = None,
    variables: Mapping[str, str] | None = None,
) -> Iterator[tuple[int, Ended]]:
    """Run `uneven` with each list of arguments, `at_once` at a time; yields (position, result) as they end.

    `commands` is read only as far as processes are started. After Ctrl-C, or when one of the runs was interrupted, the
    others end too, and KeyboardInterrupt is raised.
    """
    waiting = enumerate(commands)
    running: dict[int, _Command] = {}
    try:
        while True:
            for position, arguments in islice(waiting, at_once - len(running)):
                running[position] = _Command(arguments, cores, variables or {})
            if not running:
                return
            ended = [position for position, process in running.items() if process.wait(POLL_S / len(running))]
            for position in ended:
                yield position, running.pop(position).result()
    except KeyboardInterrupt:
        # Ctrl-C in a terminal reached the runs as well: they save and exit by themselves, unless one hangs.
        end_s = time.monotonic() + END_S
        for process in running.values():
            process.wait(max(0.0, end_s - time.monotonic()))
        raise
    finally:
        for process in running.values():
            process.end()


class Child:
    """`python -m ...` in a process that ends with this one, however this one ends (launch/lifeline.py)."""

    def __init__(self, words: Sequence[str], variables: Mapping[str, str] | None = None, **options: Any) -> None:
        lifeline, self._held = os.pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *words],
                stdin=lifeline,
                env={**os.environ, **(variables or {}), LIFELINE: "1"},
                **options,
            )
        except BaseException:
            os.close(self._held)
            raise
        finally:
            os.close(lifeline)

    def end(self) -> int:
        """Kill it if it still runs; its exit code as a shell reports it."""
        if self.process.poll() is None:
            self.process.kill()
        code = self.process.wait()
        os.close(self._held)
        return 128 - code if code < 0 else code


class _Command(Child):
    """A run of `uneven` with its output in files: nothing has to read it meanwhile."""

    def __init__(self, arguments: Sequence[str], cores: Sequence[int] | None, variables: Mapping[str, str]) -> None:
        self._files = [tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") for _ in range(2)]  # noqa: SIM115
        super().__init__(
            ["uneven", *arguments],
            {**variables, "NO_COLOR": "1"},
            stdout=self._files[0],
            stderr=self._files[1],
            preexec_fn=None if cores is None else lambda: os.sched_setaffinity(0, cores),
        )

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, after waiting for up to these seconds."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def result(self) -> Ended:
        """Of a process that has ended; KeyboardInterrupt if it was interrupted."""
        for file in self._files:
            file.seek(0)
        stdout, stderr = (file.read() for file in self._files)
        self.end()
        if self.process.returncode in (STOPPED, -signal.SIGINT, TERMINATED, -signal.SIGTERM):
            raise KeyboardInterrupt
        return Ended(self.process.returncode, stdout, stderr)

    def end(self) -> int:
        for file in self._files:
            file.close()
        return super().end()


def flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings by name as command line options; those that are None are left out."""
    return [
        argument
        for name, value in settings.items()
        if value is not None
        for argument in (f"--{name.replace('_', '-')}", str(value))
    ]
