"""How much other load disturbed a measured span: stolen CPU time, and CPU pressure by other processes.

Every printed speed is measured inside `measure_interference()`; a span that `is_disturbed` is measured again or
marked. Needs no torch. A counter that this machine does not have is None and never makes a span disturbed.

[Note: own load is no interference] Ranks that share cores wait for each other, so pressure alone is no evidence of
foreign load. It counts only if foreign processes kept the same cores busy: foreign = busy time of our cores in
/proc/stat - CPU time of our process tree. Interrupt time is not part of the busy time, because our own loopback traffic
is handled there. Pressure does not count either in a span in which our own CPU quota throttled us: the kernel accounts
that wait as pressure too. Stolen time is never our own and always counts.
"""

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from uneven.hardware.cgroup import cpu_pressure_s, num_throttled
from uneven.hardware.optional import read_text

# /proc counts in ticks of 10 ms. In a shorter span a few ticks would decide, so it is not judged.
MIN_SPAN_S = 0.2
# Work that loses 5 % of the time it wants runs 5 % slower: as much as the differences the benchmarks print.
MAX_STOLEN_SHARE = 0.05
# The same bound against one core: on a nearly idle machine 5 % of the little time wanted delays nothing.
MAX_STOLEN_CORES = 0.05
# Desktop daemons and kernel threads stay below 2 % of a machine and a tenth of a core; a busy process does not.
MAX_FOREIGN_SHARE = 0.02
MAX_FOREIGN_CORES = 0.1
# Ranks on cores of their own show 1-3 % pressure from short wake-ups; a competing busy loop per core, over 50 %.
MAX_PRESSURE_SHARE = 0.1


@dataclass(frozen=True)
class Counters:
    """One reading of the kernel's counters. All are totals that only grow; None if this machine does not have one."""

    time_s: float
    num_cores: int
    busy_s: float | None  # user and system time of all processes, over the cores this process may use
    stolen_s: float | None
    pressure_s: float | None
    own_cpu_s: float | None  # of our process tree, including ended children
    num_throttled: int


@dataclass(frozen=True)
class Interference:
    """The load on our cores between two readings; see [Note: own load is no interference] for the verdict."""

    seconds: float
    num_cores: int
    stolen_share: float | None  # of the CPU time that was requested: busy + stolen
    stolen_cores: float | None  # stolen CPU seconds per second
    foreign_share: float | None  # of all the time of our cores
    foreign_cores: float | None  # CPU seconds per second used by processes that are not ours
    pressure_share: float | None  # of the span in which some task was runnable without a core
    is_throttled: bool  # by our own CPU quota

    @classmethod
    def between(cls, begin: Counters, end: Counters) -> "Interference":
        """The interference from one reading to a later one of the same process."""
        seconds = end.time_s - begin.time_s

        def rate(first: float | None, last: float | None) -> float | None:
            if first is None or last is None or seconds < MIN_SPAN_S:
                return None
            # A total shrinks if a process leaves our tree without being waited for.
            return max(0.0, last - first) / seconds

        busy, stolen = rate(begin.busy_s, end.busy_s), rate(begin.stolen_s, end.stolen_s)
        own = rate(begin.own_cpu_s, end.own_cpu_s)
        foreign = None if busy is None or own is None else max(0.0, busy - own)
        pressure = rate(begin.pressure_s, end.pressure_s)
        return cls(
            seconds=seconds,
            num_cores=end.num_cores,
            stolen_share=None if busy is None or stolen is None else stolen / max(busy + stolen, 1e-9),
            stolen_cores=stolen,
            foreign_share=None if foreign is None else min(1.0, foreign / end.num_cores),
            foreign_cores=foreign,
            pressure_share=None if pressure is None else min(1.0, pressure),
            is_throttled=end.num_throttled > begin.num_throttled,
        )

    @property
    def is_stolen_from(self) -> bool:
        """Whether the hypervisor gave a noticeable fraction of our CPU time to other virtual machines."""
        return _reaches(self.stolen_share, MAX_STOLEN_SHARE) and _reaches(self.stolen_cores, MAX_STOLEN_CORES)

    @property
    def is_crowded(self) -> bool:
        """Whether foreign processes competed for our cores."""
        has_waited = _reaches(self.pressure_share, MAX_PRESSURE_SHARE)
        is_foreign = _reaches(self.foreign_share, MAX_FOREIGN_SHARE) and _reaches(self.foreign_cores, MAX_FOREIGN_CORES)
        return has_waited and is_foreign and not self.is_throttled

    @property
    def is_disturbed(self) -> bool:
        """Whether a speed measured over this span must not be compared with another."""
        return self.is_stolen_from or self.is_crowded

    def describe(self) -> str:
        """The verdict as one sentence."""
        reasons = []
        if self.is_stolen_from:
            reasons.append(f"the hypervisor took {self.stolen_share:.0%} of the CPU time")
        if self.is_crowded:
            waited = f"tasks waited for a core {self.pressure_share:.0%} of the time"
            reasons.append(f"other processes kept {self.foreign_cores:.1f} of {self.num_cores} cores busy and {waited}")
        if reasons:
            return f"Disturbed: {' and '.join(reasons)}."
        if self.seconds < MIN_SPAN_S:
            return f"Interference is not known: the span of {self.seconds:.2f} s is shorter than {MIN_SPAN_S} s."
        known = [
            f"{share:.1%} {name}"
            for share, name in (
                (self.stolen_share, "of the CPU time stolen"),
                (self.foreign_share, "of the cores used by other processes"),
                (self.pressure_share, "of the time under CPU pressure"),
            )
            if share is not None
        ]
        return f"Undisturbed: {', '.join(known)}." if known else "Interference is not known on this machine."

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "is_disturbed": self.is_disturbed}


def _reaches(value: float | None, limit: float) -> bool:
    return value is not None and value >= limit


class measure_interference:  # noqa: N801, used as a function: with measure_interference() as span
    """The interference over a `with` block, as `interference` after it; `pid` as in `read_counters`."""

    interference: Interference

    def __init__(self, pid: int | None = None) -> None:
        self._pid, self._begin = pid, read_counters(pid)

    def __enter__(self) -> "measure_interference":
        return self

    def __exit__(self, *_: object) -> None:
        self.interference = Interference.between(self._begin, read_counters(self._pid))


def read_counters(
    pid: int | None = None, root: Path = Path("/"), cores: Iterable[int] | None = None, time_s: float | None = None
) -> Counters:
    """Read the counters. Takes some milliseconds: one file of /proc per process of the machine.

    Our process tree is process `pid` (default: this one) with all its descendants. A rank that measures itself
    passes its launcher's pid, so that other ranks do not count as foreign.
    """
    pid = os.getpid() if pid is None else pid
    ticks = _core_ticks(root, os.sched_getaffinity(0) if cores is None else set(cores))
    per_s = os.sysconf("SC_CLK_TCK")
    tree = _process_tree(root, pid)
    return Counters(
        time_s=time.monotonic() if time_s is None else time_s,
        num_cores=max(1, len(ticks)),
        busy_s=sum(user + nice + system for user, nice, system, *_ in ticks) / per_s if ticks else None,
        stolen_s=sum(fields[7] for fields in ticks) / per_s if ticks else None,
        pressure_s=cpu_pressure_s(root),
        own_cpu_s=sum(tree.values()) / per_s if pid in tree else None,
        num_throttled=num_throttled(root),
    )


def _core_ticks(root: Path, cores: set[int]) -> list[Sequence[int]]:
    """The time fields of /proc/stat for these cores, or for all if these are not listed (lxcfs renumbers cores)."""
    ticks: dict[int, Sequence[int]] = {}
    for line in (read_text(root / "proc/stat") or "").splitlines():
        name, *fields = line.split()
        number = name.removeprefix("cpu")
        if name.startswith("cpu") and number.isdigit() and len(fields) >= 8:
            ticks[int(number)] = [int(field) for field in fields]
    chosen = [ticks[core] for core in sorted(cores & ticks.keys())] or list(ticks.values())
    # gVisor reports zeros for all cores: that means unknown, not idle.
    return chosen if any(map(any, chosen)) else []


def _process_tree(root: Path, pid: int) -> dict[int, int]:
    """CPU ticks of process `pid` and of its living descendants, each with those of its ended children."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for folder in (root / "proc").glob("[0-9]*"):
        # The name in parentheses may itself contain spaces and parentheses.
        _, _, rest = (read_text(folder / "stat") or "").rpartition(")")
        fields = rest.split()
        if len(fields) > 14:
            parents[int(folder.name)] = int(fields[1])
            ticks[int(folder.name)] = sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
    tree = {pid} & ticks.keys()
    newest = tree
    while newest:
        newest = {process for process, parent in parents.items() if parent in newest} - tree
        tree |= newest
    return {process: ticks[process] for process in sorted(tree)}
