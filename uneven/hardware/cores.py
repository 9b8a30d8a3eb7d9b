"""Assign cores to the ranks of one machine, so that ranks that train at the same time do not compete for cores.

Used by the launcher and the benchmarks. Invariant: in a pinned plan the core sets are disjoint and not empty, and no
two CPU ranks differ by more than one core. A plan that cannot be pinned has a note, because speeds are then not
comparable.
"""

import contextlib
import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from uneven.errors import InputError
from uneven.format import format_count
from uneven.hardware.cgroup import cpu_limit
from uneven.hardware.device import Device
from uneven.hardware.optional import read_text

MOST_RANKS_PER_CORE = 8  # each rank loads torch: some 300 MB and seconds of a core before it trains anything


@dataclass(frozen=True)
class CorePlan:
    """A core set and a thread count per rank, in rank order; the sets are empty if the plan is not pinned."""

    cores: tuple[tuple[int, ...], ...]
    threads: tuple[int, ...]
    pinned: bool
    note: str | None = None


def _affinity() -> list[int]:
    try:
        return sorted(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # macOS and Windows have no affinity call
        return list(range(os.cpu_count() or 1))


def _siblings(core: int, root: Path) -> tuple[int, ...]:
    """The hardware threads that share a physical core with `core`; only `core` itself if unknown."""
    text = read_text(root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list") or ""
    siblings: set[int] = set()
    for span in text.strip().split(","):
        low, _, high = span.partition("-")
        if low.isdigit() and (high.isdigit() or not high):
            siblings.update(range(int(low), int(high or low) + 1))
    return tuple(sorted(siblings)) if core in siblings else (core,)


def available_cores(root: Path = Path("/"), affinity: Iterable[int] | None = None) -> tuple[int, ...]:
    """The cores this process may use, with hardware threads of one physical core next to each other; never empty.

    A cgroup quota limits their number: a quota of 2 on 64 cores gives two cores, on different physical cores if there
    are enough.
    """
    allowed = sorted(affinity) if affinity is not None else _affinity()
    siblings = {core: _siblings(core, root) for core in allowed}
    quota = cpu_limit(root)
    if quota is not None and quota < len(allowed):
        # Prefer one thread of each physical core: two threads of one core are not as fast as two cores.
        allowed.sort(key=lambda core: (siblings[core].index(core), core))
        allowed = allowed[: max(1, int(quota))]
    # Siblings are adjacent: many machines number all first threads before all second threads, and splitting that
    # order would put two ranks on the same physical cores.
    return tuple(sorted(allowed, key=lambda core: (siblings[core], core)))


def _split_evenly(cores: Sequence[int], num_parts: int) -> list[tuple[int, ...]]:
    bounds = [len(cores) * part // num_parts for part in range(num_parts + 1)]
    return [tuple(cores[low:high]) for low, high in itertools.pairwise(bounds)]


def assign_cores(devices: Sequence[Device], cores: Sequence[int]) -> CorePlan:
    """Disjoint cores for every rank: one for each CUDA rank, the rest split evenly among the CPU ranks.

    Without CPU ranks all cores are split evenly among the CUDA ranks.
    """
    num_ranks, num_cores = len(devices), len(cores)
    if num_ranks > num_cores:
        note = (
            f"{num_ranks} ranks on {format_count(num_cores, 'core')}: nothing is pinned, "
            "the ranks compete for cores, and their speeds mean nothing"
        )
        return CorePlan(((),) * num_ranks, (1,) * num_ranks, pinned=False, note=note)
    num_cpu = sum(device.kind == "cpu" for device in devices)
    if num_cpu in (0, num_ranks):
        sets = _split_evenly(cores, num_ranks) if num_ranks else []
    else:
        # CUDA ranks take cores from the end, so that the first CPU rank starts at a whole physical core.
        num_cuda = num_ranks - num_cpu
        for_cpu = iter(_split_evenly(cores[: num_cores - num_cuda], num_cpu))
        for_cuda = iter(_split_evenly(cores[num_cores - num_cuda :], num_cuda))
        sets = [next(for_cpu if device.kind == "cpu" else for_cuda) for device in devices]
    return CorePlan(tuple(sets), tuple(len(core_set) for core_set in sets), pinned=True)


def check_count(devices: Sequence[Device], cores: Sequence[int]) -> None:
    """InputError for more ranks than the machine could even start in a sensible time and memory."""
    most = MOST_RANKS_PER_CORE * len(cores)
    if len(devices) > most:
        raise InputError(
            f"devices names {len(devices)} devices, one process each, and this machine has {len(cores)} cores: name at "
            f"most {most} ({MOST_RANKS_PER_CORE} per core); one device uses all cores by itself"
        )


def pin(cores: Iterable[int]) -> bool:
    """Pin this process, with all its present and future threads, to these cores; False if the OS cannot."""
    wanted = set(cores)
    if not wanted or not hasattr(os, "sched_setaffinity"):
        return False
    try:
        os.sched_setaffinity(0, wanted)
        # The call above pins one thread. New threads inherit it, but running ones (a thread pool) do not.
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), wanted)
    except (OSError, ValueError, OverflowError):
        return False
    return True
