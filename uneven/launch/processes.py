"""Start the ranks of this machine as processes, and see that none outlives the run.

Each rank is `python -m uneven.launch.rank FOLDER RANK`. A command, not a fork or a spawned function: it works from an
unguarded script, from `python -c`, from pytest and from a notebook.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

INTERRUPTED = 130  # exit code of a rank whose script ended because it was asked to stop


class RankProcesses:
    """The processes of one run, in rank order. `end()` leaves none behind, whatever state they are in."""

    def __init__(self, folder: Path, threads: list[int], variables: Sequence[Mapping[str, str]] = ()) -> None:
        """`variables` go into the environment of each rank's process, beside those that every rank needs."""
        self._processes: list[subprocess.Popen[bytes]] = []
        # The user's modules must be found there as here; "" stands for the current folder.
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        try:
            for rank, count in enumerate(threads):
                # OpenMP reads its variables once, when torch is loaded.
                env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(count), "MKL_NUM_THREADS": str(count)}
                env |= variables[rank] if variables else {}
                command = [sys.executable, "-m", "uneven.launch.rank", str(folder), str(rank)]
                # A session of its own: the terminal's Ctrl-C is the launcher's to interpret.
                self._processes.append(subprocess.Popen(command, env=env, start_new_session=True))
        except BaseException:
            self.end()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def exit_codes(self) -> list[int | None]:
        return [self._look(process) for process in self._processes]

    def lost(self) -> dict[int, str]:
        """None: they are on this machine."""
        return {}

    def give_up(self, number: int) -> None:
        """End this one alone, also where it is stopped; its exit code follows."""
        process = self._processes[number]
        if self._look(process) is None:
            _end_session(process.pid)
            process.kill()  # it may not lead a session of its own yet

    def end(self) -> None:
        for number in range(len(self._processes)):
            self.give_up(number)
        for process in self._processes:
            process.wait()

    def _look(self, process: "subprocess.Popen[bytes]") -> int | None:
        was_running = process.returncode is None
        code = process.poll()
        if was_running and code is not None:
            _end_session(process.pid)  # a dead rank's loader processes would wait for it
        return code


def _end_session(pid: int) -> None:
    # SIGKILL ends a stopped process too, and with its session whatever it started.
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
