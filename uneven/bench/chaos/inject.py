"""`uneven chaos`: start a run, let the faults of a plan happen to its ranks, and report how it went.

A fault happens to a rank process of this machine and of this run alone (processes.py). The last rank that trains is
left alone: with it the run would end, whatever the library does.
"""

import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from types import FrameType
from typing import Any

from uneven.bench.chaos.plan import Fault, check_ranks, draw_plan
from uneven.bench.chaos.processes import DisturbedRun, Observer
from uneven.bench.chaos.report import ChaosReport, Injected, read_results
from uneven.results.terminal import share

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
    given: tuple[Fault, ...] = ()
    seed: int = 0
    pause_s: float = 5.0
    hides_stdout: bool = False


def run_chaos(order: ChaosOrder, say: Callable[[str], None]) -> ChaosReport:
    """Run to its end, whatever that is; `say` gets a line per fault. InputError where the plan does not fit the run."""
    out = order.out if order.out is not None else Path(tempfile.mkdtemp(prefix="uneven-chaos-")) / "run"
    try:
        with _Chaos(order, out, say) as chaos:
            chaos.watch()
        if chaos.report.code == 0:
            read_results(chaos.report, out)
        return chaos.report
    finally:
        if order.out is None:
            if out.exists():  # the run has just said that its state is there
                say(f"{out} was temporary and is removed; --out FOLDER keeps what the run saves")
            rmtree(out.parent, ignore_errors=True)


class _Chaos:
    """One disturbed run. Ctrl-C and SIGTERM of this process are passed on to it, and end the faults."""

    def __init__(self, order: ChaosOrder, out: Path, say: Callable[[str], None]) -> None:
        self._order, self._say = order, say
        self.report = ChaosReport(order.seed)
        self._run = DisturbedRun(
            [*order.arguments[:1], "--out", str(out), *order.arguments[1:]], hides_stdout=order.hides_stdout
        )
        self._observer: Observer | None = None
        self._plan: Iterator[Fault] = iter(())
        self._next: Fault | None = None
        self._began_s = time.monotonic()
        self._trains_s: float | None = None  # when the first step of every rank was seen
        self._wakes: list[tuple[float, int]] = []
        self._lost: set[int] = set()  # ranks that were killed or stopped for good
        self._generation = 0  # that has settled
        self._unsettled: list[tuple[float, Injected]] = []
        self._handlers: dict[int, Any] = {}
        self._stderr = sys.stderr

    def __enter__(self) -> "_Chaos":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        sys.stderr = self._stderr
        self.report.code = self._run.close()
        if self._observer is not None:
            self._observer.close()
        self.report.seconds = time.monotonic() - self._began_s
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.report.is_stopped = True
        self._next = None
        for rank in [rank for _, rank in self._wakes] + sorted(self._lost):
            self._run.send(rank, signal.SIGCONT)  # so that it can end with the others
        self._run.stop(number)

    def watch(self) -> None:
        while self._run.poll() is None:
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
        folder = self._run.find_ranks()
        if folder is None:
            return
        sys.stderr = share(sys.stderr, folder)  # for what is said from here on
        self.report.ranks = len(self._run.ranks)
        check_ranks(self._order.given, self.report.ranks)
        self._observer = Observer(folder)
        self._plan = draw_plan(self._order.seed, self._order.rates, self.report.ranks, self._order.given)
        self._next = None if self.report.is_stopped else next(self._plan, None)

    def _let_happen(self, now: float, began: float) -> None:
        while self._next is not None and now - began >= self._next.at_s:
            self._do(self._next, now, now - began)
            self._next = next(self._plan, None)
        for when, rank in [one for one in self._wakes if one[0] <= now]:
            self._wakes.remove((when, rank))
            if self._run.send(rank, signal.SIGCONT):
                self._say(f"{now - began:.1f} s: rank {rank} goes on")

    def _do(self, fault: Fault, now: float, at_s: float) -> None:
        asleep = {rank for _, rank in self._wakes}
        before = dict(self._run.ranks)
        self._run.find_ranks()  # some may have been started again
        self._lost -= {rank for rank, process in self._run.ranks.items() if process != before[rank]}
        if fault.rank in self._lost | asleep or not self._run.is_alive(fault.rank):
            return  # it is gone, or sleeps already
        others = [rank for rank in self._run.ranks if rank not in self._lost and self._run.is_alive(rank)]
        if others == [fault.rank]:
            self._say(f"{at_s:.1f} s: rank {fault.rank} is the last one and is left alone")
            return
        if fault.kind == "cut":
            is_done = self._run.cut(fault.rank)
        else:
            is_done = self._run.send(fault.rank, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        if not is_done:
            return
        if fault.kind == "pause":
            self._wakes.append((now + self._order.pause_s, fault.rank))
        else:
            self._lost.add(fault.rank)
        injected = Injected(at_s, fault.rank, fault.kind)
        self.report.faults.append(injected)
        self._unsettled.append((now, injected))
        self._say(f"{at_s:.1f} s: rank {fault.rank} {WORDS[fault.kind].format(f'{self._order.pause_s:g}')}")

    def _look_whether_settled(self, now: float, seen: dict[str, Any]) -> None:
        """A newer generation than the last that has settled: its faults are over when all of its members train."""
        newest = int(seen["generation"])
        if newest <= self._generation or not seen["is_settled"]:
            return
        self._generation = newest
        for happened, injected in self._unsettled:
            injected.settled_s = now - happened
        self._say(f"{now - (self._trains_s or now):.1f} s: the others go on, generation {newest}")
        self._unsettled.clear()
