"""Why a device did not compute: every idle gap of a lane, with its time divided among causes.

The page and the benchmark report call it. A cause is derived from the same moment (the rank's state and the states of
the other ranks), never from the nearest event. Invariant: the causes of a lane add up to all its time outside compute.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from uneven.timeline.record import NOT_TRAINING, STATES, Span, account_of
from uneven.timeline.timeline import Lane, Timeline

START_UP = "start-up"
EPOCH_END = "epoch end"
COMMUNICATION = "communication"
UNEXPLAINED = "unexplained"
OFF_THE_CLOCK = (START_UP, *NOT_TRAINING[1:])  # causes that do not count as training time
MIN_GAP_NS = 1_000_000

# In these states a rank does no work that another rank could be waiting for.
_WITH_OTHERS = ("wait", "communication")
# States that are the cause themselves.
_OWN_CAUSE = ("data", "compile", "evaluation", "checkpoint", "user")


@dataclass(frozen=True, slots=True)
class Gap:
    """An interval in which a rank's lane does not compute. Invariant: the parts add up to its length."""

    rank: int
    start_ns: int
    end_ns: int
    parts: tuple[tuple[str, int], ...]  # (cause, ns), longest first

    @property
    def cause(self) -> str:
        """The cause of the largest part."""
        return self.parts[0][0]

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.start_ns


def idle_gaps(timeline: Timeline, at_least_ns: int = MIN_GAP_NS) -> list[Gap]:
    """Every idle gap of at least this length, lane by lane and ordered by time."""
    works = [_OwnWork(lane) for lane in timeline.lanes]
    return [gap for lane in timeline.lanes for gap in _gaps(timeline, lane, works) if gap.length_ns >= at_least_ns]


def idle_by_cause(timeline: Timeline) -> dict[int, dict[str, float]]:
    """The seconds of each cause per rank, largest first; they add up to the rank's time outside compute."""
    seconds = sum_by_cause(idle_gaps(timeline, at_least_ns=0))
    return {lane.rank: seconds.get(lane.rank, {}) for lane in timeline.lanes}


def sum_by_cause(gaps: Iterable[Gap]) -> dict[int, dict[str, float]]:
    """As `idle_by_cause`, from gaps that the caller has already; pass gaps of every length to get complete sums."""
    totals: dict[int, dict[str, int]] = {}
    for gap in gaps:
        rank_totals = totals.setdefault(gap.rank, {})
        for cause, ns in gap.parts:
            rank_totals[cause] = rank_totals.get(cause, 0) + ns
    return {rank: {cause: ns / 1e9 for cause, ns in _longest_first(causes)} for rank, causes in totals.items()}


def mean_utilisation(lane: Lane) -> float:
    """The fraction of a device's training time in which it computed; setup and evaluation do not count."""
    account = account_of(lane.rank, lane.spans)
    return account.shares["compute"]


def mean_sampled(timeline: Timeline, between_ns: tuple[int, int] | None = None, machine: int = 0) -> dict[str, float]:
    """The time-weighted mean of what a machine sampled, in percent: "cpu", "process" (100 per core), "gpu 0" ...

    A device without samples in the interval has no entry.
    """
    sums: dict[str, float] = {}
    weights: dict[str, int] = {}
    samples = [sample for sample in timeline.samples if sample.machine == machine]
    first_ns, last_ns = between_ns or (0, max((sample.t_ns for sample in samples), default=0))
    for before, sample in pairwise(samples):  # a sample covers the time since the one before
        weight = min(sample.t_ns, last_ns) - max(before.t_ns, first_ns)
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
    gap: list[Span] = []
    # An empty compute span at the end closes a gap that the lane ends with.
    for span in [*lane.spans, ("compute", 0, 0)]:
        if span[0] != "compute":
            if span[1] < span[2]:
                gap.append(span)
            continue
        if gap:
            yield _explain(lane.rank, gap, is_started, others, epochs)
            gap = []
        is_started = True


def _explain(
    rank: int, spans: Sequence[Span], is_started: bool, others: Sequence["_OwnWork"], epochs: Sequence[int]
) -> Gap:
    """The gap that these spans form; time without another cause counts as the end of an epoch that lies in the gap."""
    start, end = spans[0][1], spans[-1][2]
    next_epoch = bisect_left(epochs, start)
    rest = EPOCH_END if next_epoch < len(epochs) and epochs[next_epoch] <= end else UNEXPLAINED
    totals: dict[str, int] = {}
    for state, first, last in spans:
        for cause, ns in _causes(state, first, last, is_started, rest, others):
            totals[cause] = totals.get(cause, 0) + ns
    return Gap(rank, start, end, tuple(_longest_first(totals)))


def _causes(
    state: str, first: int, last: int, is_started: bool, rest: str, others: Sequence["_OwnWork"]
) -> list[tuple[str, int]]:
    if state in _OWN_CAUSE:
        return [(state, last - first)]
    if state == "setup" or not is_started:
        # Communication before the first step is the rendezvous of the ranks, not a transfer of training.
        return [(START_UP, last - first)]
    if state == "communication":
        return [(COMMUNICATION, last - first)]
    if state == "wait" and others:
        return _waits(first, last, others)
    return [(rest, last - first)]


def _waits(first: int, last: int, others: Sequence["_OwnWork"]) -> list[tuple[str, int]]:
    """Time until the last rank has joined is waiting for that rank; the rest is communication."""
    latest, rank = -1, 0
    for other in others:
        # If several ranks worked until the end of the wait, take the one that worked longest.
        if (end := other.finish(last)) > latest:
            latest, rank = end, other.rank
    finish = min(latest, last)
    if finish <= first:
        return [(COMMUNICATION, last - first)]
    parts = [(f"waiting for rank {rank}", finish - first)]
    return [*parts, (COMMUNICATION, last - finish)] if finish < last else parts


class _OwnWork:
    """The intervals in which a rank did work of its own: every state but waiting and communication."""

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
        """The end of the last work that began before this time, -1 if there is none."""
        index = bisect_left(self.starts, before)
        return self.ends[index - 1] if index else -1


def _longest_first(totals: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(totals.items(), key=lambda item: (-item[1], item[0]))


assert set(_OWN_CAUSE) | set(_WITH_OTHERS) | {"compute", "other", "setup"} == set(STATES), "every state has a cause"
