"""One run of the storm: start it, let its faults happen, end it if it hangs. What it left is judged by checks.py.

Faults are done to processes that this run has started, by their pid, and to no others.
"""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.faults.cases import Case, Fault
from tests.faults.training import DUMP
from tests.forked import ForkedPopen

POLL_S = 0.008
START_S = 180.0  # until the first step; a busy machine may need long for it
HANG_S = 60.0  # from the first step on, beside what its own faults take
LEFT_S = 5.0  # for ranks to end after their launcher
DUMP_S = 1.0  # for processes to write their stacks
START = "from tests.faults.training import main; main()"


@dataclass
class RankNotes:
    """What one rank process wrote: (time, letter, numbers)."""

    pid: int
    lines: list[tuple[float, str, tuple[int, ...]]] = field(default_factory=list)

    def count(self, letter: str) -> int:
        return sum(line[1] == letter for line in self.lines)

    @property
    def batches(self) -> int:
        """Samples that its step got since training began."""
        return sum(numbers[0] for _, letter, numbers in self.lines if letter == "b")

    @property
    def interrupted(self) -> int:
        """Samples of those batches after which no slot was trained."""
        own = [(letter, numbers) for _, letter, numbers in self.lines if letter in "bp"]
        after = [letter for letter, _ in own[1:]] + ["b"]
        return sum(numbers[0] for (letter, numbers), then in zip(own, after, strict=True) if letter == then == "b")

    @property
    def checksum(self) -> int | None:
        found = [numbers[1] for _, letter, numbers in self.lines if letter == "z"]
        return found[-1] if found else None


@dataclass
class Happened:
    """A fault that was done, at `time` to `pid`."""

    fault: Fault
    pid: int
    time: float


@dataclass
class Ran:
    """How a run went: exit code None where it hung and was ended."""

    case: Case
    folder: Path
    code: int | None
    seconds: float
    happened: list[Happened]
    notes: list[RankNotes]
    said: str
    stacks: str = ""
    left: int = 0  # rank processes that outlived their launcher

    @property
    def lost_pids(self) -> set[int]:
        return {one.pid for one in self.happened if one.fault.is_loss}


def run_case(case: Case, folder: Path) -> Ran:
    """Start the run in `folder`, which is new, and return when nothing of it is left."""
    folder.mkdir(parents=True)
    (folder / "case.json").write_text(json.dumps(case.to_json()))
    began = time.monotonic()
    with (folder / "said").open("w") as said:
        command = [sys.executable, "-c", START, str(folder)]
        process = ForkedPopen(command, cwd=folder, stdout=said, stderr=said)
    run = _Running(case, folder, process)
    try:
        run.watch()
    finally:
        run.end()
    seconds = time.monotonic() - began
    words = (folder / "said").read_text()
    return Ran(case, folder, run.code, seconds, run.happened, run.read_notes(), words, run.stacks, run.left)


class _Running:
    """Life cycle: `watch()` until the run has ended or hangs, then `end()`, which leaves no process."""

    def __init__(self, case: Case, folder: Path, process: "ForkedPopen") -> None:
        self.case, self.folder, self._process = case, folder, process
        self.code: int | None = None
        self.happened: list[Happened] = []
        self.stacks = ""
        self.left = 0
        self._pids: dict[int, int] = {}  # rank process -> pid
        self._offsets: dict[Path, int] = {}
        self._trained: dict[Path, int] = {}  # slots that each rank has trained, or that all ranks have
        self._waiting = sorted(case.faults, key=lambda fault: fault.at)
        self._due: list[tuple[float, Fault]] = []
        self._wakes: list[tuple[float, int]] = []  # (when, pid)
        self._family: dict[int, psutil.Process] = {}

    def watch(self) -> None:
        limit = time.monotonic() + START_S
        has_begun = False
        while (code := self._process.poll()) is None:
            self._read()
            if not has_begun and self._trained:
                has_begun = True
                faults_s = sum(fault.for_s + (3.0 if fault.is_loss else 0.0) for fault in self.case.faults)
                limit = time.monotonic() + HANG_S + faults_s
            self._let_happen(time.monotonic())
            if time.monotonic() > limit:
                self._dump()
                return
            time.sleep(POLL_S)
        self.code = code

    def read_notes(self) -> list[RankNotes]:
        found = []
        for path in sorted(self.folder.glob("rank-*")):
            notes = RankNotes(int(path.name.removeprefix("rank-")))
            for line in path.read_text().splitlines():
                at, letter, *numbers = line.split()
                notes.lines.append((float(at), letter, tuple(int(number) for number in numbers)))
            found.append(notes)
        return found

    def _read(self) -> None:
        """How far the run is, from what ranks have written since the last look."""
        for path in self.folder.glob("rank-*"):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                text = file.read()
            if not text:
                continue
            self._offsets[path] = self._offsets.get(path, 0) + len(text)
            slots = [int(line.split()[2]) for line in text.splitlines() if line.split()[1] == b"p"]
            if self.case.is_exact:  # every rank takes part in every slot
                self._trained[path] = max([*slots, self._trained.get(path, 0)])
            else:
                self._trained[path] = self._trained.get(path, 0) + len(slots)

    @property
    def _progress(self) -> float:
        trained = self._trained.values()
        return (max(trained, default=0) if self.case.is_exact else sum(trained)) / self.case.total_slots

    def _let_happen(self, now: float) -> None:
        while self._waiting and self._progress >= self._waiting[0].at:
            fault = self._waiting.pop(0)
            self._due.append((now + fault.later_ms / 1e3, fault))
        for when, fault in [one for one in self._due if one[0] <= now]:
            self._due.remove((when, fault))
            self._do(fault, now)
        for when, pid in [one for one in self._wakes if one[0] <= now]:
            self._wakes.remove((when, pid))
            self._send(pid, signal.SIGCONT)

    def _do(self, fault: Fault, now: float) -> None:
        pid = self._process.pid if fault.kind == "delay" else self._pid_of(fault.victim)
        if pid is None:
            return
        self._note_family()
        if self._send(pid, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP):
            self.happened.append(Happened(fault, pid, time.time()))
            if fault.for_s:
                self._wakes.append((now + fault.for_s, pid))

    def _pid_of(self, victim: int) -> int | None:
        """The rank process of this number, which is a child of the launcher and says so in its command line."""
        if not self._pids:
            self._note_family()
            for pid, process in self._family.items():
                with suppress(psutil.Error):
                    words = process.cmdline()
                    if "uneven.launch.rank" in words:
                        self._pids[int(words[words.index("uneven.launch.rank") + 2])] = pid
        return self._pids.get(victim)

    def _note_family(self) -> None:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._process.pid)
            self._family |= {one.pid: one for one in [process, *process.children(recursive=True)]}

    def _send(self, pid: int, number: int) -> bool:
        """Only to a process of this run that is still the same one."""
        process = self._family.get(pid)
        try:
            if process is None or not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                return False
            process.send_signal(number)
        except psutil.NoSuchProcess:
            return False
        return True

    def _dump(self) -> None:
        """The stacks of all processes that hang, for the report."""
        self._note_family()
        for pid in self._family:
            if (self.folder / f"stack-{pid}").exists():
                self._send(pid, DUMP)
        time.sleep(DUMP_S)
        texts = [(path.name, path.read_text()) for path in sorted(self.folder.glob("stack-*"))]
        self.stacks = "\n".join(f"{name}:\n{text}" for name, text in texts if text)

    def end(self) -> None:
        """Nothing of the run is left, however it ended."""
        self._note_family()
        if self.code is not None:
            ranks = [self._family[pid] for pid in self._pids.values()]
            self.left = len(psutil.wait_procs(ranks, timeout=LEFT_S)[1])
        for pid in list(self._family):
            self._send(pid, signal.SIGKILL)
        with suppress(ProcessLookupError, ChildProcessError):
            if self._process.poll() is None:
                os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()
        psutil.wait_procs(list(self._family.values()), timeout=10)
