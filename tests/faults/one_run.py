"""One run of the storm: start it, let its faults happen, end it if it hangs. What it left is judged by checks.py.

Faults are done to processes that this run has started, by their pid, and to no others; cables and disks are its own.
"""

import json
import math
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.faults.cases import Case
from tests.faults.fault import INSIDE, Fault
from tests.faults.places import Place, place
from tests.faults.training import DUMP, JOIN_S
from uneven.bench.chaos.inject import Injector, rank_processes, send

POLL_S = 0.008
START_S = 240.0  # until the first step; a busy machine may need long for it
HANG_S = 90.0  # from the first step on, beside what its own faults take
LEFT_S = 5.0  # for ranks to end after their launcher
CUT_OFF_S = 30.0  # for a machine that was cut off to find out
END_S = 0.3  # before its end a run needs nobody any more
DUMP_S = 1.0  # for processes to write their stacks


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

    def since_round(self, back: int) -> int:
        """Samples of its batches since it merged the round so many before its last."""
        rounds = [place for place, (_, letter, _) in enumerate(self.lines) if letter == "r"]
        first = rounds[-back] if len(rounds) >= back else 0
        return sum(numbers[0] for _, letter, numbers in self.lines[first:] if letter == "b")

    @property
    def is_newcomer(self) -> bool:
        return any(letter == "s" and numbers[1] for _, letter, numbers in self.lines)

    @property
    def checksum(self) -> int | None:
        found = [numbers[1] for _, letter, numbers in self.lines if letter == "z"]
        return found[-1] if found else None


@dataclass
class Happened:
    """A fault that was done, at `time` to these processes."""

    fault: Fault
    pids: tuple[int, ...]
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
    left: int = 0  # processes that outlived their launcher
    generations: dict[int, float] = field(default_factory=dict)  # when the launcher told the ranks of each

    @property
    def losses(self) -> int:
        """Faults that others had to go on after: a run that is about to end may not notice."""
        ends = [at for notes in self.notes for at, letter, _ in notes.lines if letter == "z"]
        return sum(one.fault.is_loss and one.time < min(ends, default=math.inf) - END_S for one in self.happened)

    @property
    def lost_pids(self) -> set[int]:
        """Those that may have been lost."""
        return {pid for one in self.happened if one.fault.may_be_loss for pid in one.pids}


def run_case(case: Case, folder: Path) -> Ran:
    """Start the run in `folder`, which is new, and return when nothing of it is left."""
    folder.mkdir(parents=True)
    (folder / "case.json").write_text(json.dumps(case.to_json()))
    began = time.monotonic()
    with place(case, folder) as there:
        run = _Running(case, folder, there)
        try:
            run.watch()
        finally:
            run.end()
    seconds = time.monotonic() - began
    words = (folder / "said-0").read_text()
    notes = run.read_notes()
    run.happened += [
        Happened(case.faults[numbers[0]], (one.pid,), at)
        for one in notes
        for at, letter, numbers in one.lines
        if letter == "x"
    ]
    return Ran(case, folder, run.code, seconds, run.happened, notes, words, run.stacks, run.left, _generations(folder))


def _generations(folder: Path) -> dict[int, float]:
    path = folder / "launcher"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return {int(number): float(at) for at, _, number in lines}


class _Running:
    """Life cycle: `watch()` until the run has ended or hangs, then `end()`, which leaves no process."""

    def __init__(self, case: Case, folder: Path, there: Place) -> None:
        self.case, self.folder, self._place = case, folder, there
        self.code: int | None = None
        self.happened: list[Happened] = []
        self.stacks = ""
        self.left = 0
        self._pids: dict[int, dict[int, int]] = {}  # machine -> rank process -> pid
        self._offsets: dict[Path, int] = {}
        self._trained: dict[Path, int] = {}  # slots that each rank has trained, or that all ranks have
        outside = [fault for fault in case.faults if fault.kind not in INSIDE]
        self._waiting = sorted(outside, key=lambda fault: fault.at)
        self._due: list[tuple[float, Fault]] = []
        self._undo: list[tuple[float, Fault]] = []  # when a disk has room again, or a cable is plugged in
        self._injector = Injector()
        self._family: dict[int, psutil.Process] = {}

    def watch(self) -> None:
        limit = time.monotonic() + START_S
        has_begun = False
        leader = self._place.launchers[0]
        while (code := leader.poll()) is None:
            self._read()
            if not has_begun and self._trained:
                has_begun = True
                faults_s = sum(fault.for_s + (10.0 if fault.may_be_loss else 0.0) for fault in self.case.faults)
                limit = time.monotonic() + HANG_S + faults_s + (JOIN_S if self.case.kind == "join" else 0.0)
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
            text = text[: text.rfind(b"\n") + 1]  # a line that crosses a page may be seen in halves
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
        for when, fault in [one for one in self._undo if one[0] <= now]:
            self._undo.remove((when, fault))
            self._end_fault(fault)
        self._injector.wake()

    def _do(self, fault: Fault, now: float) -> None:
        self._note_family()
        leader = self._place.launchers[0].pid
        pids: tuple[int, ...] = ()
        if fault.kind == "join":
            self._place.join(fault.victim)
        elif fault.kind == "full":
            self._place.fill_disk()
        elif fault.kind == "cut":
            pids = tuple(self._ranks_on(fault.victim).values())
            if fault.how == "launcher":
                self._send(self._place.launchers[fault.victim].pid, signal.SIGKILL)
            else:
                self._place.cut(fault.victim)
        else:
            found = leader if fault.kind == "delay" else self._pid_of(fault.victim)
            process = None if found is None else self._family.get(found)
            kind = "kill" if fault.kind == "kill" else "pause" if fault.for_s else "stop"
            if process is None or not self._injector.do(kind, process, fault.for_s):
                return
            pids = (process.pid,)
        self.happened.append(Happened(fault, pids, time.time()))
        if fault is self.case.faults[0]:
            (self.folder / "awaited").touch()
        if fault.for_s and fault.kind in ("full", "cut"):
            self._undo.append((now + fault.for_s, fault))

    def _end_fault(self, fault: Fault) -> None:
        if fault.kind == "full":
            self._place.free_disk()
        else:
            self._place.plug_in(fault.victim)

    def _pid_of(self, victim: int) -> int | None:
        """The rank process of this number; they are counted over all machines of the start."""
        for machine, count in enumerate(self.case.machines):
            if victim < count:
                return self._ranks_on(machine).get(victim)
            victim -= count
        return None

    def _ranks_on(self, machine: int) -> dict[int, int]:
        """The rank processes of the start, which are children of the machine's launcher and say so in their command."""
        if machine not in self._pids:
            found = rank_processes(self._place.launchers[machine].pid, recursive=True)
            self._pids[machine] = {number: process.pid for number, (process, _) in found.items()}
        return self._pids[machine]

    def _family_of(self, machine: int) -> list[psutil.Process]:
        try:
            process = psutil.Process(self._place.launchers[machine].pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _note_family(self) -> None:
        for machine in range(len(self._place.launchers)):
            self._family |= {one.pid: one for one in self._family_of(machine)}

    def _send(self, pid: int, number: int) -> bool:
        """Only to a process of this run."""
        return pid in self._family and send(self._family[pid], number)

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
        self._place.free_disk()
        self._note_family()
        others = self._place.launchers[1:]
        if self.code is not None:
            patience_s = CUT_OFF_S if others else LEFT_S
            pids = [*(pid for ranks in self._pids.values() for pid in ranks.values()), *(one.pid for one in others)]
            known = [self._family[pid] for pid in pids if pid in self._family]
            self.left = len(psutil.wait_procs(known, timeout=patience_s)[1])
        for pid in list(self._family):
            self._send(pid, signal.SIGKILL)
        for launcher in self._place.launchers:
            with suppress(ProcessLookupError, ChildProcessError):
                if launcher.poll() is None:
                    os.kill(launcher.pid, signal.SIGKILL)
            launcher.wait()
        psutil.wait_procs(list(self._family.values()), timeout=10)
