"""`uneven chaos`: start a run, let the faults of a plan happen to its ranks, and report how it went.

A fault happens to a rank process of this machine and of this run alone (inject.py). The last rank that trains is left
alone: with it the run would end, whatever the library does.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from types import FrameType
from typing import Any

import psutil

from uneven.bench.chaos.inject import Injector, is_alive, rank_processes, send
from uneven.bench.chaos.plan import Fault, check_ranks, draw_plan
from uneven.bench.chaos.report import ChaosReport, Injected
from uneven.bench.single.process import Child
from uneven.results.terminal import share

OBSERVE = "uneven.launch.watch.observe"
POLL_S = 0.02
WORDS = {
    "kill": "is killed",
    "stop": "is stopped for good",
    "pause": "is stopped for {} s",
    "cut": "loses its connections",
}


@dataclass(frozen=True, kw_only=True)
class ChaosOrder:
    """What is run and what happens to it."""

    arguments: tuple[str, ...]  # of `uneven run`, without --out
    out: Path | None = None  # None: a temporary folder
    rates: dict[str, float] = field(default_factory=dict)  # per rank and second
    named: tuple[Fault, ...] = ()  # by --at
    seed: int = 0
    pause_s: float = 5.0
    hides_stdout: bool = False


def run_chaos(order: ChaosOrder, say: Callable[[str], None]) -> ChaosReport:
    """Run to its end, whatever that is; `say` gets a line per fault. InputError where the plan does not fit the run."""
    out = order.out if order.out is not None else Path(tempfile.mkdtemp(prefix="uneven-chaos-")) / "run"
    try:
        with _Chaos(order, out, say) as chaos:
            chaos.watch()
        chaos.report.read_results(out)
        return chaos.report
    finally:
        if order.out is None:
            if out.exists():  # the run has just said that its state is there
                say(f"{out} was temporary and is removed; --out FOLDER keeps what the run saves")
            rmtree(out.parent, ignore_errors=True)


class _Chaos:
    """One disturbed run. Ctrl-C and SIGTERM of this process are passed on to it, and end the faults.

    The run has a session of its own, so that Ctrl-C of the terminal reaches it once.
    """

    def __init__(self, order: ChaosOrder, out: Path, say: Callable[[str], None]) -> None:
        self._order = order
        self._say = say
        self.report = ChaosReport(order.seed)
        self._run = Child(
            ["uneven", "run", *order.arguments[:1], "--out", str(out), *order.arguments[1:]],
            stdout=2 if order.hides_stdout else None,  # stderr
            start_new_session=True,
        )
        self._ranks: dict[int, psutil.Process] = {}  # by their number at the start; the newest in its place
        self._observer: Observer | None = None
        self._injector = Injector()
        self._plan: Iterator[Fault] = iter(())
        self._next: Fault | None = None
        self._began_s = time.monotonic()
        self._trains_s: float | None = None  # when the first step of every rank was seen
        self._lost: set[int] = set()  # ranks that were killed, stopped for good or cut off
        self._generation = 0  # the newest whose members all train
        self._open: list[tuple[float, Injected]] = []  # faults that the others have not trained on after
        self._handlers: dict[int, Any] = {}
        self._stderr = sys.stderr

    def __enter__(self) -> "_Chaos":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        sys.stderr = self._stderr
        self.report.exit_code = self._run.end()  # its ranks end with it
        for process in self._ranks.values():
            send(process, signal.SIGKILL)  # a stopped one cannot see that its launcher is gone
        if self._observer is not None:
            self._observer.close()
        self.report.seconds = time.monotonic() - self._began_s
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.report.stopped = True
        self._next = None
        self._injector.wake(all_of_them=True)  # so that they can end with the others
        for rank in self._lost:
            send(self._ranks[rank], signal.SIGCONT)
        with suppress(ProcessLookupError):
            self._run.process.send_signal(number)

    def watch(self) -> None:
        while self._run.process.poll() is None:
            now = time.monotonic()
            if self._observer is None:
                self._look_for_ranks()
            elif self._trains_s is None:
                self._trains_s = now if self._observer.look()["is_training"] else None
            else:
                self._let_happen(now, self._trains_s)
                self._look_whether_settled(now, self._observer.look())
            time.sleep(POLL_S)

    def _look_for_ranks(self) -> None:
        folder = self._find_ranks()
        if folder is None:
            return
        sys.stderr = share(sys.stderr, folder)  # for what is said from here on
        self.report.ranks = len(self._ranks)
        check_ranks(self._order.named, self.report.ranks)
        self._observer = Observer(folder)
        self._plan = draw_plan(self._order.seed, self._order.rates, self.report.ranks, self._order.named)
        self._next = None if self.report.stopped else next(self._plan, None)

    def _find_ranks(self) -> Path | None:
        """The private folder of the run once all rank processes are there; also finds those started in their place."""
        with suppress(OSError, ValueError):
            for number, (process, folder) in sorted(rank_processes(self._run.process.pid).items()):
                self._ranks[json.loads((folder / f"plan-{number}.json").read_text())["began_as"]] = process
            if self._ranks and len(self._ranks) == len(json.loads((folder / "plan-0.json").read_text())["members"]):
                return folder
        return None

    def _let_happen(self, now: float, began: float) -> None:
        while self._next is not None and now - began >= self._next.at_s:
            self._do(self._next, now, now - began)
            self._next = next(self._plan, None)
        awake = self._injector.wake()
        for rank in [rank for rank, process in self._ranks.items() if process in awake]:
            self._say(f"{now - began:.1f} s: rank {rank} goes on")

    def _do(self, fault: Fault, now: float, at_s: float) -> None:
        before = dict(self._ranks)
        self._find_ranks()  # some may have been started again
        self._lost -= {rank for rank, process in self._ranks.items() if process != before[rank]}
        process, pause_s = self._ranks[fault.rank], self._order.pause_s
        if fault.rank in self._lost or self._injector.is_paused(process) or not is_alive(process):
            return  # it is gone, or sleeps already
        others = [rank for rank, other in self._ranks.items() if rank not in self._lost and is_alive(other)]
        if others == [fault.rank]:
            self._say(f"{at_s:.1f} s: rank {fault.rank} is the last one and is left alone")
            return
        if not self._injector.do(fault.kind, process, pause_s):
            return
        if fault.kind != "pause":
            self._lost.add(fault.rank)
        injected = Injected(at_s, fault.rank, fault.kind)
        self.report.faults.append(injected)
        self._open.append((now, injected))
        self._say(f"{at_s:.1f} s: rank {fault.rank} {WORDS[fault.kind].format(f'{pause_s:g}')}")

    def _look_whether_settled(self, now: float, seen: dict[str, Any]) -> None:
        """The faults before a generation are over when all of its members train."""
        newest = int(seen["generation"])
        if newest <= self._generation or not seen["is_settled"]:
            return
        self._generation = newest
        for happened, injected in self._open:
            injected.settled_s = now - happened
        self._say(f"{now - (self._trains_s or now):.1f} s: the others go on, generation {newest}")
        self._open.clear()


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
