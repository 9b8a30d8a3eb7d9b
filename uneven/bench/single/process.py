"""Runs the `uneven` command in a fresh process, for measurements that must not depend on earlier ones.

Used by sweeps, scaling and policies. The process ends with this one (launch/lifeline.py).
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from uneven.errors import STOPPED, TERMINATED
from uneven.launch.lifeline import LIFELINE

END_S = 10.0  # given to a run to save and exit after Ctrl-C


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
    lifeline, held = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "uneven", *arguments],
        stdin=lifeline,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "NO_COLOR": "1", LIFELINE: "1"},
        preexec_fn=None if cores is None else lambda: os.sched_setaffinity(0, cores),
    )
    os.close(lifeline)
    try:
        stdout, stderr = process.communicate()
    except KeyboardInterrupt:
        # Ctrl-C reached the run as well: it saves and exits by itself, unless it hangs.
        try:
            process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
    finally:
        os.close(held)
    if process.returncode in (STOPPED, -signal.SIGINT, TERMINATED, -signal.SIGTERM):
        raise KeyboardInterrupt
    return Ended(process.returncode, stdout, stderr)


def flags(given: Mapping[str, Any]) -> list[str]:
    """Settings by name as command line options; those that are None are left out."""
    return [
        argument
        for name, value in given.items()
        if value is not None
        for argument in (f"--{name.replace('_', '-')}", str(value))
    ]
