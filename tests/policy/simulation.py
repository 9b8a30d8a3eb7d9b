"""A cluster on a simulated clock, whose ranks drive `Windows` and `SlotSchedule` as the ranks of a real run do.

Every rank is a generator with its own slot schedule and its own copy of the controller. It yields how long it is busy,
or the round whose average it waits for. What must hold in any run (every slot once, events respected, copies equal,
no rank stuck) is checked here; tests look at the rest.
"""

import heapq
import json
import random
from collections import deque
from collections.abc import Container, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

from uneven.policy.axis import Axis
from uneven.policy.slot_schedule import SlotSchedule, first_free_slot
from uneven.policy.stream_axis import UNKNOWN, StreamAxis
from uneven.policy.stream_end import StreamEnd
from uneven.policy.windows import Decision, LocalSGDConfig, RoundReport, Windows

NEVER = float("inf")
END = -1


@dataclass
class Cluster:
    """The truth, which the controller sees only through measured times. All times in ms."""

    slot_ms: list[float]
    total: int
    seed: int = 0
    jitter: float = 0.05  # of every slot and transfer, uniform, either way
    spikes: float = 0.0  # how often a slot takes three times as long
    wander: float = 0.0  # a factor that holds for some dozen slots: noise that a window does not average out
    stop: tuple[int, int, float] | None = None  # (rank, from this slot on, ms): stands still, once
    freeze: tuple[int, float, float] | None = None  # (rank, probability, ms): stands still before it asks for a slot
    change: tuple[int, int, float] | None = None  # (rank, from this slot on, factor of its time)
    lies: list[float] | None = None  # factors of the times that ranks tell the others
    transfer_ms: float = 1.0
    touch_ms: float = 0.1  # a snapshot or a merge, of the rank's own time
    claim_ms: float = 0.1
    lookahead: int = 0
    epoch: int | None = None  # slots, where every epoch's end is an event
    slot_size: int = 64
    short: int = 64  # samples of an epoch's last slot
    hides_ends: bool = False  # a stream without length: a rank is told of an epoch's end when it asks for a slot there

    @property
    def ranks(self) -> int:
        return len(self.slot_ms)

    def next_event(self, slot: int) -> int:
        epoch = self.epoch or self.total
        return min((slot // epoch + 1) * epoch, self.total)

    @property
    def epochs(self) -> int:
        return -(-self.total // (self.epoch or self.total))

    def epoch_samples(self, epoch: int) -> int:
        length = self.epoch or self.total
        return sum(self.samples(slot) for slot in range(epoch * length, min((epoch + 1) * length, self.total)))

    def samples(self, slot: int) -> int:
        is_last = (slot + 1) % (self.epoch or self.total) == 0
        return self.short if is_last else self.slot_size


@dataclass
class Round:
    """One average: on its way when all ranks have come, and there some time later."""

    due: int
    rows: dict[int, RoundReport] = field(default_factory=dict)
    entered_ms: dict[int, float] = field(default_factory=dict)
    merged_ms: dict[int, float] = field(default_factory=dict)
    met_ms: float = NEVER
    arrival_ms: float = NEVER
    waiting: list[int] = field(default_factory=list)
    handed: dict[int, int] = field(default_factory=dict)  # by each rank before it merged: the end of its slots
    free: int = 0  # first_free_slot
    print: int | None = None  # of the controller that has noted it
    anchor: float = 0.0
    counts: tuple[int, ...] = ()


@dataclass
class Outcome:
    """A finished run."""

    cluster: Cluster
    makespan_ms: float = 0.0
    useful_ms: float = 0.0
    claims: int = 0
    most_lead: int = 0
    rounds: list[Round] = field(default_factory=list)
    work: list[tuple[int, float, float]] = field(default_factory=list)  # (slot, start, end)
    decisions: list[tuple[int, Decision]] = field(default_factory=list)  # with the number of their round
    slots: dict[int, list[int]] = field(default_factory=dict)  # every rank's, in order
    state: dict[str, Any] = field(default_factory=dict)  # of the controller in the end
    start: int = 0
    stop: int = 0
    requested: set[int] = field(default_factory=set)  # slots that became events for a wish

    def next_event(self, slot: int) -> int:
        """As it was in the end."""
        event = self.cluster.next_event(slot)
        return min([event, *(one for one in self.requested if one > slot)])

    @property
    def efficiency(self) -> float:
        return self.useful_ms / (self.cluster.ranks * self.makespan_ms)

    @property
    def delays(self) -> list[float]:
        """From each rank's snapshot to its merge, in slots of the slowest rank."""
        slowest_ms = max(self.cluster.slot_ms)
        return [
            (one.merged_ms[rank] - at_ms) / slowest_ms for one in self.rounds for rank, at_ms in one.entered_ms.items()
        ]

    @property
    def periods_ms(self) -> list[float]:
        """Between the arrivals of two averages."""
        return [later.arrival_ms - one.arrival_ms for one, later in zip(self.rounds, self.rounds[1:], strict=False)]


Life = Generator["float | Round", None, None]


class Simulation:
    """`hints` are the times per slot measured beforehand; None as in a loop of the user's own.

    A run may begin at a slot > 0, with the `state` of another run's controller or none, and stop at an event. In every
    round of these `wishes` (numbers) a rank wishes for an event as soon as possible.
    """

    def __init__(
        self,
        cluster: Cluster,
        config: LocalSGDConfig,
        hints: list[float] | None = None,
        max_staleness: int | None = None,
        *,
        start: int = 0,
        stop: int | None = None,
        state: dict[str, Any] | None = None,
        wishes: Container[int] = (),
    ) -> None:
        self.cluster, self.config = cluster, config
        self.now_ms = 0.0
        self.outcome = Outcome(cluster, start=start, stop=cluster.total if stop is None else stop)
        self.state, self.wishes = state, wishes
        self.claimed = 0
        self._rng = random.Random(cluster.seed)
        self._queue: list[tuple[float, int]] = [(0.0, rank) for rank in range(cluster.ranks)]
        self._ranks = [_Rank(self, rank, hints, max_staleness) for rank in range(cluster.ranks)]

    def run(self) -> Outcome:
        lives = [rank.life() for rank in self._ranks]
        left = len(lives)
        while self._queue:
            self.now_ms, rank = heapq.heappop(self._queue)
            wish = next(lives[rank], None)
            if wish is None:
                left -= 1
            elif not isinstance(wish, Round):
                heapq.heappush(self._queue, (self.now_ms + wish, rank))
            elif wish.arrival_ms < NEVER:
                heapq.heappush(self._queue, (wish.arrival_ms, rank))
            else:
                wish.waiting.append(rank)
        assert left == 0, "ranks wait for each other for ever"
        self.outcome.makespan_ms = self.now_ms
        self.outcome.state = self._ranks[0].windows.state_dict()
        self.outcome.most_lead = max(rank.most_lead for rank in self._ranks)
        check_stream(self.outcome) if self.cluster.hides_ends else check(self.outcome)
        return self.outcome

    def claim(self, many: int) -> int:
        first, self.claimed = self.claimed, self.claimed + many
        self.outcome.claims += 1
        return first

    def enter(self, rank: int, number: int, due: int, row: RoundReport) -> Round:
        rounds = self.outcome.rounds
        number -= 0 if self.state is None else int(self.state["rounds"])
        if number == len(rounds):
            rounds.append(Round(due))
        one = rounds[number]
        assert one.due == due, "copies disagree about a round's slot"
        one.rows[rank], one.entered_ms[rank] = row, self.now_ms
        if len(one.rows) == self.cluster.ranks:
            jitter = 1.0 + self._rng.uniform(-self.cluster.jitter, self.cluster.jitter)
            one.met_ms, one.arrival_ms = self.now_ms, self.now_ms + self.cluster.transfer_ms * jitter
            for waiting in one.waiting:
                heapq.heappush(self._queue, (one.arrival_ms, waiting))
        return one

    def note(self, one: Round, windows: Windows) -> None:
        rows = [one.rows[rank] for rank in range(self.cluster.ranks)]
        number = windows.rounds
        decisions = windows.note(rows)
        if one.print is None:
            one.print, one.anchor, one.counts = windows.fingerprint(), windows.anchor, windows.counts
            self.outcome.decisions += [(number, made) for made in decisions]
        assert one.print == windows.fingerprint(), "copies differ after a round"


class _Rank:
    """The loop of one rank, with work and waiting replaced by time."""

    def __init__(self, simulation: Simulation, rank: int, hints: list[float] | None, max_staleness: int | None) -> None:
        self.simulation, self.rank, self.cluster = simulation, rank, simulation.cluster
        cluster, config = self.cluster, simulation.config
        hints = None if hints is None else list(hints)
        axis: Axis = Axis(1, cluster.slot_size, 1)
        next_event, total = cluster.next_event, cluster.total
        if cluster.hides_ends:
            axis = stream = StreamAxis(cluster.slot_size, cluster.epochs)
            stream.connect(self._ends_within)
            next_event = lambda slot: stream.epoch_end(min(stream.epochs_before(slot), stream.epochs - 1))  # noqa: E731
            total = UNKNOWN
        self._requested: set[int] = set()
        static = next_event
        next_event = lambda slot: min([static(slot), *(one for one in self._requested if one > slot)])  # noqa: E731
        self.stream_end, self.epoch = StreamEnd(axis), 0
        self.windows = Windows(config, cluster.ranks, cluster.slot_size, next_event, hints, cluster.hides_ends)
        if simulation.state is not None:
            self.windows.load_state_dict(json.loads(json.dumps(simulation.state)))
        if simulation.outcome.start:
            self.windows.resume_at(simulation.outcome.start)
        self.slot_schedule = SlotSchedule(
            self.windows, rank, total, self._claim if config.is_async else None, max_staleness
        )
        self.slot_schedule.claim_ms, self.slot_schedule.lookahead = cluster.claim_ms, cluster.lookahead
        self._handed_stop = 0
        self.round = Round(0)  # the last one entered
        self.most_lead = 0
        self._rng = random.Random(f"{cluster.seed} {rank}")
        self._owed_ms = 0.0  # spent on claims since the clock last moved
        self._busy_ms = self._samples = 0.0
        self._costs = RoundReport()
        self._has_stopped = False
        self._spell = (0, 1.0)  # slots left, factor

    @property
    def is_over(self) -> bool:
        return self.slot_schedule.is_over or self.windows.passed >= self.simulation.outcome.stop

    def life(self) -> Life:
        yield from self._boundary()
        idle, feed = 0, self._feed()
        while True:
            if self._freezes():
                yield self.cluster.freeze[2]  # type: ignore[index]
            slot = next(feed, END)
            if slot is END:
                return
            if self._owed_ms:
                yield self._paid_ms()
            before = self.windows.rounds, self.slot_schedule.in_flight
            if slot is not None:
                yield self._slot_ms(slot)
                self._note_slot(slot)
            yield from self._boundary()
            has_moved = slot is not None or before != (self.windows.rounds, self.slot_schedule.in_flight)
            idle = 0 if has_moved else idle + 1
            assert idle <= self.cluster.lookahead, "nothing to train and nothing to enter: a hang"

    def _feed(self) -> Iterator[int | None]:
        """Slots in the order handed out; a loader asks for the next one before it gives the oldest."""
        ahead = deque(self._hand() for _ in range(self.cluster.lookahead))
        while not self.is_over:
            ahead.append(self._hand())
            yield ahead.popleft()

    def _freezes(self) -> bool:
        freeze = self.cluster.freeze
        return freeze is not None and freeze[0] == self.rank and self._rng.random() < freeze[1]

    def _hand(self) -> int | None:
        slot = self.slot_schedule.hand()
        self._handed_stop = max(self._handed_stop, 0 if slot is None else slot + 1)
        if slot is None or not self.cluster.hides_ends:
            return slot
        found = self.stream_end.slot(slot, self.epoch, self.slot_schedule)
        assert found is None or found.samples == self.cluster.samples(slot), "a slot of the wrong size"
        return None if found is None else slot

    def _ends_within(self, epoch: int, first: int, count: int) -> int:
        samples = self.cluster.epoch_samples(epoch)
        return samples if samples <= first + count else 0

    def _boundary(self) -> Life:
        slot_schedule = self.slot_schedule
        while not self.is_over:
            if slot_schedule.in_flight:
                if not slot_schedule.may_merge(self.round.arrival_ms <= self.simulation.now_ms):
                    break
                yield from self._merge()
            elif slot_schedule.is_due():
                yield from self._enter()
            else:
                break
        if self._owed_ms:
            yield self._paid_ms()

    def _enter(self) -> Life:
        row = self._costs._replace(
            next_slot=float(self.slot_schedule.next_slot),
            samples=self._samples,
            busy_ms=self._busy_ms,
            fingerprint=float(self.windows.fingerprint()),
            end_samples=float(self.stream_end.samples),
            limit=float(self.slot_schedule.set_limit()),
        )
        self._busy_ms = self._samples = 0.0
        self.round = self.simulation.enter(self.rank, self.windows.rounds, self.windows.due, row)
        self.slot_schedule.enter()
        is_blocking = self.windows.is_blocking
        yield self.cluster.touch_ms + self._paid_ms()
        if is_blocking:
            yield from self._merge()

    def _merge(self) -> Life:
        one = self.round
        if one.arrival_ms > self.simulation.now_ms:
            yield one
        entered_ms, touch_ms = one.entered_ms[self.rank], self.cluster.touch_ms
        self._costs = RoundReport(transfer_ms=2.0 * touch_ms, latency_ms=one.arrival_ms - entered_ms)
        one.merged_ms[self.rank] = self.simulation.now_ms
        rows = [one.rows[rank] for rank in range(self.cluster.ranks)]
        self.stream_end.learn(rows, self.epoch)
        passed = self.windows.passed
        one.handed[self.rank] = self._handed_stop
        one.free = first_free_slot(rows, self.windows.event)
        if self.windows.rounds in self.simulation.wishes:
            self._requested.add(one.free)
            self.windows.learn_event(one.free)
            self.simulation.outcome.requested.add(one.free)
        self.simulation.note(one, self.windows)
        self.slot_schedule.merged()
        if self.windows.passed != passed:
            self.stream_end.passed()
            self.epoch += 1
        yield touch_ms

    def _slot_ms(self, slot: int) -> float:
        """What the slot takes, a stop apart; only then it is useful and busy time."""
        cluster, rng = self.cluster, self._rng
        ms = cluster.slot_ms[self.rank] * cluster.samples(slot) / cluster.slot_size
        ms *= 1.0 + rng.uniform(-cluster.jitter, cluster.jitter)
        if cluster.change is not None and cluster.change[0] == self.rank and slot >= cluster.change[1]:
            ms *= cluster.change[2]
        if cluster.spikes and rng.random() < cluster.spikes:
            ms *= 3.0
        if cluster.wander:
            left, factor = self._spell
            self._spell = (
                (left - 1, factor) if left else (rng.randint(5, 100), 1.0 + rng.uniform(-1, 1) * cluster.wander)
            )
            ms *= self._spell[1]
        self.simulation.outcome.useful_ms += ms
        stop = cluster.stop
        if stop is not None and stop[0] == self.rank and slot >= stop[1] and not self._has_stopped:
            self._has_stopped = True
            ms += stop[2]
        self._busy_ms += ms * (cluster.lies[self.rank] if cluster.lies else 1.0)
        self._start_ms = self.simulation.now_ms
        return ms

    def _note_slot(self, slot: int) -> None:
        self.simulation.outcome.work.append((slot, self._start_ms, self.simulation.now_ms))
        self.simulation.outcome.slots.setdefault(self.rank, []).append(slot)
        self._samples += self.cluster.samples(slot)
        self.slot_schedule.trained()
        if self.slot_schedule.in_flight:
            self.most_lead = max(self.most_lead, self.slot_schedule.staleness)

    def _claim(self, many: int) -> int:
        self._owed_ms += self.cluster.claim_ms
        return self.simulation.claim(many)

    def _paid_ms(self) -> float:
        owed_ms, self._owed_ms = self._owed_ms, 0.0
        return owed_ms


def check_stream(outcome: Outcome) -> None:
    """What must hold where epochs end at slots that nobody knew beforehand."""
    cluster, rounds = outcome.cluster, outcome.rounds
    work = sorted(outcome.work)
    assert [slot for slot, *_ in work] == list(range(cluster.total)), "not every slot exactly once"
    for one in rounds:
        assert len(one.merged_ms) == cluster.ranks, "a rank missed a round"
        assert len({row.fingerprint for row in one.rows.values()}) == 1, "copies differed before a round"
    event, free_ms = 0, 0.0
    while event < cluster.total:
        last, event = event, cluster.next_event(event)
        one = next(one for one in rounds if all(row.next_slot >= event for row in one.rows.values()))
        assert all(free_ms <= start and end <= one.met_ms for _, start, end in work[last:event]), (
            "a slot on the wrong side of an epoch's end"
        )
        free_ms = one.arrival_ms


def check(outcome: Outcome) -> None:
    """What must hold in every run, whatever the cluster."""
    cluster, rounds = outcome.cluster, outcome.rounds
    work, start, stop = sorted(outcome.work), outcome.start, outcome.stop
    assert [slot for slot, *_ in work] == list(range(start, stop)), "not every slot exactly once"
    trained = sum(cluster.samples(slot) for slot in range(start, stop))
    assert sum(row.samples for one in rounds for row in one.rows.values()) == trained, "work outside all averages"
    dues = [one.due for one in rounds]
    assert dues == sorted(set(dues)), "rounds out of axis order"
    assert dues[-1] == stop, "the last round is not at the end"
    for one in rounds:
        assert len(one.merged_ms) == cluster.ranks, "a rank missed a round"
        assert len({row.fingerprint for row in one.rows.values()}) == 1, "copies differed before a round"
        assert max(one.handed.values()) <= one.free, "a rank was handed a slot beyond the event it had still to learn"
        assert all(at_ms >= one.arrival_ms for at_ms in one.merged_ms.values()), "merged before it was there"
    event, free_ms = start, 0.0
    while event < stop:
        last, event = event, outcome.next_event(event)
        assert event in dues, "an event without a round"
        one = rounds[dues.index(event)]
        assert all(row.next_slot >= event for row in one.rows.values()), "a rank passed an event too early"
        assert all(free_ms <= start and end <= one.met_ms for _, start, end in work[last - start : event - start]), (
            "a slot on the wrong side of an event"
        )
        free_ms = one.arrival_ms
