"""Start the ranks of this machine as processes, and see that none outlives the run.

Each rank is `python -P -m uneven.launch.rank FOLDER RANK`. A command, not a fork or a spawned function: it works from
an unguarded script, from `python -c`, from pytest and from a notebook.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from uneven.errors import USER_ERRORS, MachineError
from uneven.launch.cleanup import end_session, process_state

EARLY = 256  # no exit code of a process: one that ended with 0 in the middle of its run, which nobody would miss
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # where the launcher is lost, torch's store warns with frames of its own C++
# `-m` puts the current folder before all others. Where modules there are named like those beside the user's script, the
# ranks trained with the wrong ones. Before Python 3.11 launch/rank.py takes it away itself.
OWN_PATH = ["-P"] if sys.version_info >= (3, 11) else []
INTERRUPTED = 130  # exit code of a rank whose script ended because it was asked to stop


class RankProcesses:
    """The processes of one run on this machine, by their numbers. `end()` leaves none behind, whatever their state.

    They are numbered from 0 in rank order; one that is started later gets the number that its launcher chooses.
    """

    def __init__(self, folder: Path, threads: list[int], variables: Sequence[Mapping[str, str]] = ()) -> None:
        """`variables` go into the environment of each rank's process, beside those that every rank needs."""
        self._folder = folder
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._environments: dict[int, Mapping[str, str]] = {}
        # The user's modules must be found there as here; "" stands for the current folder.
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        try:
            for rank, count in enumerate(threads):
                # OpenMP reads its variables once, when torch is loaded.
                env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(count), "MKL_NUM_THREADS": str(count)}
                self._start(rank, {**QUIET, **env, **(variables[rank] if variables else {})})
        except BaseException:
            self.end()
            raise

    def start_again(self, number: int, like: int) -> None:
        """Start process `number` with the environment of another one, which has ended."""
        self._start(number, self._environments[like])

    def _start(self, number: int, env: Mapping[str, str]) -> None:
        command = [sys.executable, *OWN_PATH, "-m", "uneven.launch.rank", str(self._folder), str(number)]
        # A session of its own: the terminal's Ctrl-C is the launcher's to interpret.
        try:
            self._processes[number] = subprocess.Popen(command, env=env, start_new_session=True)
        except OSError as error:  # EAGAIN, ENOMEM
            raise MachineError(
                f"the process of rank {number} does not start ({error.strerror}): allow more processes ('ulimit -u', a "
                "container's --pids-limit), or use fewer devices"
            ) from error
        self._environments[number] = env

    @property
    def numbers(self) -> list[int]:
        return list(self._processes)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    def exit_codes(self) -> list[int | None]:
        """In the order of their numbers; None for one that runs."""
        return [self._look(process) for process in self._processes.values()]

    def stopped(self) -> set[int]:
        """Those that a signal has stopped: in code of the user's own a rank may be silent, but not like that."""
        return {number for number, process in self._processes.items() if process_state(process.pid) == "T"}

    def give_up(self, number: int) -> None:
        """End this one alone, also where it is stopped; its exit code follows."""
        process = self._processes[number]
        if self._look(process) is None:
            end_session(process.pid)
            process.kill()  # it may not lead a session of its own yet

    def end(self) -> None:
        for number in self._processes:
            self.give_up(number)
        for process in self._processes.values():
            process.wait()

    def _look(self, process: "subprocess.Popen[bytes]") -> int | None:
        was_running = process.returncode is None
        code = process.poll()
        if was_running and code is not None:
            end_session(process.pid)  # a dead rank's loader processes would wait for it
        return code


def describe_exit(code: int) -> str:
    if code == EARLY:
        return "ended with exit code 0 before its run was over"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def leave_error(folder: Path, number: int, report: Mapping[str, Any]) -> None:
    """Of a rank that failed by itself; complete from the first moment that it can be seen."""
    draft = folder / f".error-{number}"
    draft.write_text(json.dumps(report))
    draft.rename(folder / f"error-{number}.json")


def read_errors(folder: Path, numbers: Sequence[int]) -> dict[int, dict[str, Any]]:
    """What those of these processes that failed by themselves have reported."""
    paths = {number: folder / f"error-{number}.json" for number in numbers}
    return {number: json.loads(path.read_text()) for number, path in paths.items() if path.exists()}


def describe_error(error: Mapping[str, Any]) -> str:
    """What a rank has reported in its error-NUMBER.json, as one line; whole where it is a sentence for the user."""
    if error["kind"] in USER_ERRORS:
        return str(error["message"]).partition("\n")[0]
    place = f" at {error['place']}" if error.get("place") else ""
    return str(error["what"]).partition("\n")[0][:200] + place


def is_about_peer(what: str) -> bool:
    """Whether this error of a rank only says that another one is gone."""
    return "peer" in what or what.startswith("GroupLostError")
