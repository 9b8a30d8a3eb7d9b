"""Why a device did not compute: every idle stretch of a lane, its time divided among its causes.

A cause comes from what is known of that very moment (the rank's state, and what the other ranks were doing), never
from the nearest event. So the causes of a lane add up to all of its time that is not compute.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from uneven.timeline.device import Span, account_of
from uneven.timeline.record import APART, STATES
from uneven.timeline.timeline import Lane, Timeline

START_UP, EPOCH_END, TRANSFER, UNEXPLAINED = "start-up", "epoch end", "transfer", "unexplained"
OFF_THE_CLOCK = (START_UP, *APART[1:])  # causes that are no loss of training time
LEAST_NS = 1_000_000

# In these a rank does nothing that another one would have to wait for.
_WITH_OTHERS = ("wait", "communication")
_NAMED = ("data", "compile", "evaluation", "checkpoint")


@dataclass(frozen=True, slots=True)
class Gap:
    """A stretch in which a rank's lane does not compute. Invariant: the parts add up to its length."""

    rank: int
    start_ns: int
    end_ns: int
    parts: tuple[tuple[str, int], ...]  # (cause, ns), the longest first

    @property
    def cause(self) -> str:
        """Where most of it went."""
        return self.parts[0][0]

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.start_ns


def idle_gaps(timeline: Timeline, at_least_ns: int = LEAST_NS) -> list[Gap]:
    """Every idle stretch of at least this length, lane by lane and in order."""
    works = [_OwnWork(lane) for lane in timeline.lanes]
    return [gap for lane in timeline.lanes for gap in _gaps(timeline, lane, works) if gap.length_ns >= at_least_ns]


def idle_by_cause(timeline: Timeline) -> dict[int, dict[str, float]]:
    """Per rank the seconds of each cause, the largest first; together the rank's time outside compute."""
    found = sum_by_cause(idle_gaps(timeline, at_least_ns=0))
    return {lane.rank: found.get(lane.rank, {}) for lane in timeline.lanes}


def sum_by_cause(gaps: Iterable[Gap]) -> dict[int, dict[str, float]]:
    """The same of gaps that are known: those of any length, or the sums lack what the others had."""
    totals: dict[int, dict[str, int]] = {}
    for gap in gaps:
        own = totals.setdefault(gap.rank, {})
        for cause, ns in gap.parts:
            own[cause] = own.get(cause, 0) + ns
    return {rank: {cause: ns / 1e9 for cause, ns in _longest_first(own)} for rank, own in totals.items()}


def mean_utilisation(lane: Lane) -> float:
    """The part of a device's training time in which it computed, from 0 to 1; set-up and evaluation are apart."""
    account = account_of(lane.rank, lane.spans)
    return account.shares["compute"]


def mean_sampled(timeline: Timeline, between_ns: tuple[int, int] | None = None) -> dict[str, float]:
    """The time-weighted mean of each sampled utilisation in percent: "cpu", "process" (100 per core), "gpu 0" ...

    A sample speaks for the time since the one before it, so the first one only says where that time begins. A device
    that was not sampled in the time asked for has no entry.
    """
    first_ns, last_ns = between_ns or (0, max((sample.t_ns for sample in timeline.samples), default=0))
    sums: dict[str, float] = {}
    weights: dict[str, int] = {}
    before: int | None = None
    for sample in timeline.samples:
        weight = 0 if before is None else min(sample.t_ns, last_ns) - max(before, first_ns)
        before = sample.t_ns
        if weight <= 0:
            continue
        gpus = [(f"gpu {index}", utilisation) for index, utilisation, _ in sample.gpus]
        for name, value in [("cpu", sample.cpu), ("process", sample.process_cpu), *gpus]:
            sums[name] = sums.get(name, 0.0) + weight * value
            weights[name] = weights.get(name, 0) + weight
    return {name: total / weights[name] for name, total in sums.items()}


def _gaps(timeline: Timeline, lane: Lane, works: Sequence["_OwnWork"]) -> Iterator[Gap]:
    others = [work for work in works if work.rank != lane.rank]
    epochs = [event.t_ns for event in timeline.events if event.rank == lane.rank and event.kind == "epoch"]
    is_started = False
    stretch: list[Span] = []
    # A last span of nothing ends the stretch that the lane may end with.
    for span in [*lane.spans, ("compute", 0, 0)]:
        if span[0] != "compute":
            if span[1] < span[2]:
                stretch.append(span)
            continue
        if stretch:
            yield _explain(lane.rank, stretch, is_started, others, epochs)
            stretch = []
        is_started = True


def _explain(
    rank: int, stretch: Sequence[Span], is_started: bool, others: Sequence["_OwnWork"], epochs: Sequence[int]
) -> Gap:
    start, end = stretch[0][1], stretch[-1][2]
    place = bisect_left(epochs, start)
    rest = EPOCH_END if place < len(epochs) and epochs[place] <= end else UNEXPLAINED
    totals: dict[str, int] = {}
    for state, first, last in stretch:
        for cause, ns in _causes(state, first, last, is_started, rest, others):
            totals[cause] = totals.get(cause, 0) + ns
    return Gap(rank, start, end, tuple(_longest_first(totals)))


def _causes(
    state: str, first: int, last: int, is_started: bool, rest: str, others: Sequence["_OwnWork"]
) -> list[tuple[str, int]]:
    if state in _NAMED:
        return [(state, last - first)]
    if state == "setup" or not is_started:
        return [(START_UP, last - first)]  # before the first step ranks meet, and that is none of training's transfers
    if state == "communication":
        return [(TRANSFER, last - first)]
    if state == "wait" and others:
        return _waits(first, last, others)
    return [(rest, last - first)]


def _waits(first: int, last: int, others: Sequence["_OwnWork"]) -> list[tuple[str, int]]:
    """For the rank that came last; once all had come, what was left of it was the wire."""
    latest, rank = -1, 0
    for other in others:
        # Of several that were at work until the end the one that stayed longest: moments are known to microseconds.
        if (end := other.finish(last)) > latest:
            latest, rank = end, other.rank
    finish = min(latest, last)
    if finish <= first:
        return [(TRANSFER, last - first)]
    parts = [(f"waiting for rank {rank}", finish - first)]
    return [*parts, (TRANSFER, last - finish)] if finish < last else parts


class _OwnWork:
    """When a rank did its own work, by itself: everything but waiting and communication."""

    def __init__(self, lane: Lane) -> None:
        self.rank = lane.rank
        self.starts: list[int] = []
        self.ends: list[int] = []
        for state, first, last in lane.spans:
            if state in _WITH_OTHERS or first == last:
                continue
            if self.ends and self.ends[-1] == first:
                self.ends[-1] = last
            else:
                self.starts.append(first)
                self.ends.append(last)

    def finish(self, before: int) -> int:
        """When its last work that began before this moment ended."""
        place = bisect_left(self.starts, before)
        return self.ends[place - 1] if place else -1


def _longest_first(totals: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(totals.items(), key=lambda item: (-item[1], item[0]))


assert set(_NAMED) | set(_WITH_OTHERS) | {"compute", "other", "setup"} == set(STATES), "every state has its causes"
