"""Which faults happen to which rank, and when: what `uneven chaos` was asked for, as a plan.

Invariant: the plan is a function of seed, rates and the number of ranks alone, so a run that went wrong is disturbed in
the same way again. Each rank and kind of fault has a stream of its own: another rate for one kind, or one rank more,
leaves all other faults where they were. Times count from the first step on.
"""

import heapq
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from uneven.bench.chaos.inject import KINDS
from uneven.errors import InputError

_RATE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)/(s|min|h)")
_TIME = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|s|min|h)")
_SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True, order=True)
class Fault:
    """What happens to one rank process; `rank` is its number when the run starts, also of one started in its place."""

    at_s: float
    rank: int
    kind: str


def parse_rate(option: str, text: str) -> float:
    """ "0.1/min" -> faults per second, of each rank."""
    found = _RATE.fullmatch(text.replace(" ", ""))
    if found is None:
        raise InputError(f"{option} {text!r} must be a rate per rank, as in 0.1/min; allowed are /s, /min and /h")
    return float(found[1]) / _SECONDS[found[2]]


def parse_time(option: str, text: str) -> float:
    """ "10s" -> seconds."""
    found = _TIME.fullmatch(text.replace(" ", ""))
    if found is None:
        raise InputError(f"{option} {text!r} must be a time, as in 10s; allowed are ms, s, min and h")
    return float(found[1]) * _SECONDS[found[2]]


def parse_fault(text: str) -> Fault:
    """ "10s:kill:1" -> rank 1 is killed ten seconds after the first step."""
    words = text.split(":")
    kinds = ", ".join(KINDS)
    if len(words) != 3 or words[1] not in KINDS or not words[2].isdecimal():
        raise InputError(f"--at {text!r} must be TIME:FAULT:RANK, as in 10s:kill:1; the faults are {kinds}")
    return Fault(parse_time(f"--at {text}:", words[0]), int(words[2]), words[1])


def check_ranks(faults: Sequence[Fault], ranks: int) -> None:
    """InputError where a fault names a rank that the run does not have, or there is nobody to go on."""
    if ranks < 2:
        raise InputError(
            "the run has one rank, so none could go on after a fault; name two devices or more, as in --devices cpu,cpu"
        )
    for fault in faults:
        if fault.rank >= ranks:
            raise InputError(f"--at ...:{fault.kind}:{fault.rank}: the run has ranks 0 to {ranks - 1}")


def draw_plan(seed: int, rates: Mapping[str, float], ranks: int, named: Sequence[Fault] = ()) -> Iterator[Fault]:
    """All faults in the order of their times, without end where a rate is not 0; `rates` are per rank and second."""
    streams = [
        _stream(seed, kind, rank, rates[kind]) for kind in KINDS for rank in range(ranks) if rates.get(kind, 0.0) > 0
    ]
    return heapq.merge(sorted(named), *streams)


def _stream(seed: int, kind: str, rank: int, rate: float) -> Iterator[Fault]:
    """Faults of one kind that happen to one rank, independently of each other (a Poisson process)."""
    chance = random.Random(f"{seed}/{kind}/{rank}")
    at_s = 0.0
    while math.isfinite(at_s):
        at_s += chance.expovariate(rate)
        yield Fault(at_s, rank, kind)
