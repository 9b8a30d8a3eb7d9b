"""Policies on a simulated clock, for the drawings of tools/draw_policies.py: two devices with a speed ratio of 2.5.

The policies are the package's own; times are assumed, not measured, and noise is the same in every run.
"""

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from uneven.policy.axis import Axis
from uneven.policy.exact import ExactPolicy
from uneven.policy.finish import Cost
from uneven.policy.round_report import RoundReport
from uneven.policy.slot_schedule import SlotSchedule
from uneven.policy.windows import LocalSGDConfig, Windows

BATCH = 64
COSTS = (Cost(4.0, 36.0 / BATCH), Cost(10.0, 90.0 / BATCH))  # 40 and 100 ms a batch: a gap of 2.5
SLOT_MS = [cost.time_ms(BATCH) for cost in COSTS]
ALONE = sum(BATCH / ms for ms in SLOT_MS)  # samples per ms of both devices, each alone
WIRE_MS = 5.0  # a sum of gradients, or of params
TOUCH_MS = 1.0  # a snapshot or a merge, on the rank's own time
CLAIM_MS = 0.1
NOISE = 0.08  # relative, of the time of a batch
SHOWN_MS = 1000.0


@dataclass
class Span:
    """A rank's activity in an interval: compute, wait or wire."""

    rank: int
    kind: Literal["compute", "wait", "wire"]
    start_ms: float
    end_ms: float
    samples: float = 0.0


@dataclass
class Average:
    """A round: the slot at which it was due, and for each rank the times and slots at which it entered and merged."""

    due: int
    rows: dict[int, RoundReport] = field(default_factory=dict)
    entered_ms: dict[int, float] = field(default_factory=dict)
    merged_at: dict[int, int] = field(default_factory=dict)
    joined_ms: float = float("inf")  # when the last rank had entered

    @property
    def averaged_ms(self) -> float:
        return self.joined_ms + WIRE_MS


@dataclass
class Trace:
    """A simulated run: `owner[slot]` is the rank that trained it."""

    spans: list[Span] = field(default_factory=list)
    rounds: list[Average] = field(default_factory=list)
    owner: dict[int, int] = field(default_factory=dict)

    def efficiency(self) -> float:
        """Samples trained in the time shown, over those that both devices train alone in that time."""
        trained = 0.0
        for span in self.spans:
            if span.samples:
                inside = min(span.end_ms, SHOWN_MS) - min(span.start_ms, SHOWN_MS)
                trained += span.samples * inside / (span.end_ms - span.start_ms)
        return trained / (ALONE * SHOWN_MS)


def run_exact(policy: ExactPolicy) -> Trace:
    """Simulate an exact policy: every step ends in a sum over all ranks, without overlap, which is the worst case."""
    trace, noise, now_ms, slot = Trace(), _noise(), 0.0, 0
    whole = BATCH * len(COSTS)
    while now_ms < SHOWN_MS:
        shares = policy.shares(slot, whole)
        busy_ms = [
            cost.time_ms(share) * next(noise[rank])
            for rank, (cost, share) in enumerate(zip(COSTS, shares, strict=True))
        ]
        for rank, ms in enumerate(busy_ms):
            ends = (now_ms, now_ms + ms, now_ms + max(busy_ms), now_ms + max(busy_ms) + WIRE_MS)
            for kind, start_ms, end_ms in zip(("compute", "wait", "wire"), ends[:-1], ends[1:], strict=True):
                trace.spans.append(Span(rank, kind, start_ms, end_ms, shares[rank] if kind == "compute" else 0.0))
        policy.note(slot, whole, busy_ms)
        now_ms, slot = now_ms + max(busy_ms) + WIRE_MS, slot + 1
    return trace


def run_local(is_async: bool, axis: Axis, anchor: int) -> Trace:
    """Simulate a local policy: ranks are generators on one clock, which yield the end of their work or a round."""
    trace, clock, count = Trace(), [0.0], [0]

    def claim(many: int) -> int:
        count[0] += many
        return count[0] - many

    config = LocalSGDConfig(is_async=is_async, anchor=anchor)
    ranks = [_run_rank(rank, trace, clock, axis, config, claim if is_async else None) for rank in range(len(COSTS))]
    queue = [(0.0, rank) for rank in range(len(ranks))]
    waiting: list[tuple[Average, int]] = []
    while queue:
        clock[0], rank = heapq.heappop(queue)
        request = next(ranks[rank], None)
        if isinstance(request, Average):
            waiting.append((request, rank))
        elif request is not None:
            heapq.heappush(queue, (request, rank))
        for round_, waiting_rank in [pair for pair in waiting if pair[0].joined_ms < float("inf")]:
            waiting.remove((round_, waiting_rank))
            heapq.heappush(queue, (max(clock[0], round_.averaged_ms), waiting_rank))
    assert sorted(trace.owner) == list(range(axis.total)), "not every slot was trained"
    return trace


def _run_rank(
    rank: int, trace: Trace, clock: list[float], axis: Axis, config: LocalSGDConfig, claim: Callable[[int], int] | None
) -> Iterator[float | Average]:
    """The loop of uneven/train/local_sgd.py, with work replaced by time."""

    def spend(kind: str, ms: float, samples: float = 0.0) -> float:
        trace.spans.append(Span(rank, kind, clock[0], clock[0] + ms, samples))
        return clock[0] + ms

    def next_event(slot: int) -> int:  # evaluated after every epoch
        return min(axis.epoch_end(slot // axis.slots_per_epoch), axis.total)

    windows = Windows(config, len(COSTS), BATCH, next_event, list(SLOT_MS))
    schedule = SlotSchedule(windows, rank, axis.total, claim)
    schedule.claim_ms = CLAIM_MS
    noise, costs, samples, busy_ms, round_ = _noise()[rank], RoundReport(), 0, 0.0, Average(0)
    while not schedule.is_over:
        slot = schedule.hand()
        if slot is not None:
            many = axis.slot(slot).samples
            ms = COSTS[rank].time_ms(many) * next(noise)
            yield spend("compute", ms, many)
            schedule.trained()
            trace.owner[slot] = rank
            samples, busy_ms = samples + many, busy_ms + ms
        while not schedule.is_over:
            if schedule.in_flight:
                if not (windows.is_blocking or schedule.may_merge(round_.averaged_ms <= clock[0])):
                    break
                began_ms = clock[0]
                if round_.averaged_ms > began_ms:
                    yield round_
                    joined_ms = min(max(began_ms, round_.joined_ms), clock[0])
                    trace.spans.append(Span(rank, "wait", began_ms, joined_ms))
                    trace.spans.append(Span(rank, "wire", joined_ms, clock[0]))
                entered_ms = round_.entered_ms[rank]
                costs = RoundReport(transfer_ms=2 * TOUCH_MS, latency_ms=round_.averaged_ms - entered_ms)
                round_.merged_at[rank] = schedule.next_slot
                windows.note([round_.rows[other] for other in range(len(COSTS))])
                schedule.merged()
                yield spend("wire", TOUCH_MS)
            elif schedule.is_due():
                if windows.rounds == len(trace.rounds):
                    trace.rounds.append(Average(windows.due))
                round_ = trace.rounds[windows.rounds]
                round_.rows[rank] = costs._replace(next_slot=schedule.next_slot, samples=samples, busy_ms=busy_ms)
                round_.entered_ms[rank] = clock[0]
                if len(round_.rows) == len(COSTS):
                    round_.joined_ms = clock[0]
                samples, busy_ms = 0, 0.0
                schedule.enter()
                yield spend("wire", TOUCH_MS)
            else:
                break


def _noise() -> list[Iterator[float]]:
    """Factors on the times of each rank, the same in every policy."""

    def factors(rank: int) -> Iterator[float]:
        draw = random.Random(f"uneven {rank}")
        while True:
            yield 1.0 + NOISE * (2.0 * draw.random() - 1.0)

    return [factors(rank) for rank in range(len(COSTS))]
