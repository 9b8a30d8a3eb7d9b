"""The run that `uneven chaos` disturbs: its process, its ranks on this machine, and what they tell. No torch here.

Signals go only to rank processes that the run itself has started: children of its launcher, known by their command
line, and still the same process when the signal is sent.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from uneven.bench.chaos.connections import cut
from uneven.launch.lifeline import LIFELINE

RANK = "uneven.launch.rank"
OBSERVE = "uneven.launch.watch.observe"


class DisturbedRun:
    """`uneven run` with these arguments. Life cycle: made, `poll` until it has ended, `close`.

    It has a session of its own: Ctrl-C of the terminal is passed on by the caller, once.
    """

    def __init__(self, arguments: Sequence[str], *, hides_stdout: bool) -> None:
        lifeline, self._held = os.pipe()  # the run ends with this process, however this one ends
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "uneven", "run", *arguments],
                stdin=lifeline,
                stdout=2 if hides_stdout else None,  # stderr
                env={**os.environ, LIFELINE: "1"},
                start_new_session=True,
            )
        except BaseException:
            os.close(self._held)
            raise
        finally:
            os.close(lifeline)
        self.ranks: dict[int, psutil.Process] = {}  # by their number at the start; the newest in its place

    def poll(self) -> int | None:
        return self._process.poll()

    def find_ranks(self) -> Path | None:
        """Look for the rank processes; the folder of the run once all of them are there."""
        with suppress(psutil.Error, OSError, ValueError):
            found: dict[int, tuple[Path, psutil.Process]] = {}
            for child in psutil.Process(self._process.pid).children():
                words = child.cmdline()
                if RANK in words:
                    place = words.index(RANK)
                    found[int(words[place + 2])] = Path(words[place + 1]), child
            for number, (folder, child) in sorted(found.items()):
                plan = json.loads((folder / f"plan-{number}.json").read_text())
                self.ranks[plan["began_as"]] = child
            if self.ranks and len(self.ranks) == len(json.loads((folder / "plan-0.json").read_text())["members"]):
                return folder
        return None

    def is_alive(self, rank: int) -> bool:
        """Whether it runs; a stopped one counts, too."""
        try:
            process = self.ranks[rank]
            return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    def send(self, rank: int, number: int) -> bool:
        """Whether the signal was sent: not to a process that has ended."""
        if not self.is_alive(rank):
            return False
        try:
            self.ranks[rank].send_signal(number)
        except psutil.NoSuchProcess:
            return False
        return True

    def cut(self, rank: int) -> bool:
        """Whether it had connections, which are shut down now."""
        return self.is_alive(rank) and cut(self.ranks[rank].pid) > 0

    def stop(self, number: int) -> None:
        """Pass Ctrl-C or SIGTERM on to the launcher, which saves."""
        with suppress(ProcessLookupError):
            if self._process.poll() is None:
                self._process.send_signal(number)

    def close(self) -> int:
        """No process of the run is left; its exit code as a shell reports it."""
        if self._process.poll() is None:
            self._process.kill()  # its ranks end with it
        code = self._process.wait()
        os.close(self._held)
        for rank in self.ranks:
            self.send(rank, signal.SIGKILL)  # a stopped one cannot see that its launcher is gone
        return 128 - code if code < 0 else code


class Observer:
    """What the ranks of a run tell in its store: launch/watch/observe.py reads it in a process of its own."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", OBSERVE, str(folder)]
        # When the run ends its store is gone, and torch prints a stack about that.
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self._process.stdout is not None, "a pipe"
        os.set_blocking(self._process.stdout.fileno(), False)
        self._text = b""
        self.seen: dict[str, Any] = {"is_training": False, "generation": 0, "is_settled": True}

    def look(self) -> dict[str, Any]:
        """The newest that is known: whether all ranks train, the generation, and whether its members have settled."""
        assert self._process.stdout is not None, "a pipe"
        self._text += self._process.stdout.read() or b""
        *lines, self._text = self._text.split(b"\n")
        if lines:
            self.seen = json.loads(lines[-1])
        return self.seen

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None, "a pipe"
        self._process.stdout.close()
