"""A cluster on a simulated clock, whose ranks drive `Windows` and `Course` as a real rank does.

Every rank is a generator with a course and a copy of the controller of its own. It yields how long it is busy, or the
round whose average it waits for. What must hold in any run (every slot once, events respected, copies equal, nobody
stuck) is checked here; tests look at the rest.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

from uneven.policy.course import Course
from uneven.policy.windows import Decision, Row, Terms, Windows

Life = Generator["float | Round", None, None]


@dataclass
class Cluster:
    """The truth that controllers see only through measured times. All times in ms."""

    slot_ms: list[float]
    total: int
    seed: int = 0
    jitter: float = 0.05  # of a slot, uniform, either way
    spikes: float = 0.0  # how often a slot takes three times as long
    wander: float = 0.0  # noise that a longer window does not average out: a factor that holds for a while
    stop: tuple[int, int, float] | None = None  # (rank, from this slot on, ms): stands still once
    change: tuple[int, int, float] | None = None  # (rank, from this slot on, factor)
    transfer_ms: float = 1.0
    touch_ms: float = 0.1  # of the rank's own time, for a snapshot and again for a merge
    claim_ms: float = 0.1
    lookahead: int = 0
    epoch: int | None = None  # slots; every epoch end is an event
    slot_size: int = 64
    short: int | None = None  # samples of an epoch's last slot
    divergence: Callable[[int, float], float] = lambda round_, anchor: 0.0

    def next_event(self, slot: int) -> int:
        epoch = self.epoch or self.total
        return min((slot // epoch + 1) * epoch, self.total)

    def samples(self, slot: int) -> int:
        is_last = (slot + 1) % (self.epoch or self.total) == 0
        return self.short if is_last and self.short else self.slot_size


@dataclass
class Round:
    """One average under way: it is there when all have come, and some time later."""

    number: int
    due: int
    rows: dict[int, Row] = field(default_factory=dict)
    entered: dict[int, float] = field(default_factory=dict)
    merged: dict[int, float] = field(default_factory=dict)
    complete_ms: float = float("inf")
    arrival_ms: float = float("inf")
    waiting: list[int] = field(default_factory=list)
    after: dict[str, object] = field(default_factory=dict)  # the controller's state once it was noted


@dataclass
class Outcome:
    """A finished run: `work` holds (slot, rank, start, end) in order of ends."""

    cluster: Cluster
    makespan_ms: float = 0.0
    useful_ms: float = 0.0
    claims: int = 0
    rounds: list[Round] = field(default_factory=list)
    work: list[tuple[int, int, float, float]] = field(default_factory=list)
    decisions: list[tuple[int, Decision]] = field(default_factory=list)  # (round, what rank 0's copy changed)
    anchors: list[float] = field(default_factory=list)  # after every round
    counts: list[tuple[int, ...]] = field(default_factory=list)
    most_lead: int = 0

    @property
    def efficiency(self) -> float:
        return self.useful_ms / (len(self.cluster.slot_ms) * self.makespan_ms)

    def delays(self, skip: int = 0) -> list[float]:
        """From each rank's snapshot to its merge, in slots of the slowest rank."""
        slowest = max(self.cluster.slot_ms)
        return [
            (round_.merged[rank] - at) / slowest for round_ in self.rounds[skip:] for rank, at in round_.entered.items()
        ]


class Simulation:
    def __init__(
        self,
        cluster: Cluster,
        terms: Terms,
        hints: list[float] | None = None,
        max_lead: int | None = None,
        is_claimed: bool | None = None,
    ) -> None:
        self.cluster, self.terms = cluster, terms
        self.rng = random.Random(cluster.seed)
        self.now_ms = 0.0
        self.outcome = Outcome(cluster)
        self.count = 0  # what claims are taken from
        ranks = len(cluster.slot_ms)
        self.ranks = [_Rank(self, rank, hints, max_lead) for rank in range(ranks)]

    def run(self) -> Outcome:
        lives = [rank.life() for rank in self.ranks]
        queue = [(0.0, rank) for rank in range(len(lives))]
        alive = len(lives)
        while queue:
            self.now_ms, rank = heapq.heappop(queue)
            wish = next(lives[rank], None)
            if wish is None:
                alive -= 1
            elif isinstance(wish, Round):
                if wish.arrival_ms < float("inf"):
                    heapq.heappush(queue, (max(self.now_ms, wish.arrival_ms), rank))
                else:
                    wish.waiting.append(rank)
            else:
                heapq.heappush(queue, (self.now_ms + wish, rank))
            for round_ in self.outcome.rounds[-2:]:
                if round_.arrival_ms < float("inf"):
                    for one in round_.waiting:
                        heapq.heappush(queue, (round_.arrival_ms, one))
                    round_.waiting.clear()
        assert alive == 0, "ranks wait for each other for ever"
        self.outcome.makespan_ms = self.now_ms
        self.outcome.most_lead = max(rank.most_lead for rank in self.ranks)
        check(self.outcome)
        return self.outcome

    def claim(self, many: int) -> int:
        first, self.count = self.count, self.count + many
        self.outcome.claims += 1
        return first

    def round(self, number: int, due: int) -> Round:
        rounds = self.outcome.rounds
        if number == len(rounds):
            rounds.append(Round(number, due))
        assert rounds[number].due == due, "copies disagree about a round's slot"
        return rounds[number]

    def join(self, round_: Round, rank: int, row: Row) -> None:
        round_.rows[rank], round_.entered[rank] = row, self.now_ms
        if len(round_.rows) == len(self.ranks):
            jitter = 1.0 + self.rng.uniform(-self.cluster.jitter, self.cluster.jitter)
            round_.complete_ms = self.now_ms
            round_.arrival_ms = self.now_ms + self.cluster.transfer_ms * jitter

    def note(self, round_: Round, windows: Windows) -> None:
        rows = [round_.rows[rank] for rank in range(len(self.ranks))]
        assert len({row.fingerprint for row in rows}) == 1, "copies differ before the round"
        made = windows.note(rows)
        state: dict[str, object] = {
            "print": windows.fingerprint(),
            "start": windows.start,
            "due": windows.due,
            "event": windows.event,
            "made": made,
        }
        if not round_.after:
            round_.after = state
            self.outcome.decisions += [(round_.number, one) for one in made]
            self.outcome.anchors.append(windows.anchor)
            self.outcome.counts.append(windows.counts)
        assert round_.after == state, "copies differ after the round"


class _Rank:
    """One rank: the loop of the local pace, with work and waiting replaced by time."""

    def __init__(self, sim: Simulation, rank: int, hints: list[float] | None, max_lead: int | None) -> None:
        cluster = sim.cluster
        self.sim, self.rank, self.cluster = sim, rank, cluster
        self.windows = Windows(
            sim.terms, len(cluster.slot_ms), cluster.slot_size, cluster.next_event, list(hints) if hints else None
        )
        claim = self._claim if sim.terms.is_async else None
        self.course = Course(self.windows, rank, cluster.total, claim, max_lead)
        self.course.claim_ms = cluster.claim_ms
        self.rng = random.Random(f"{cluster.seed} {rank}")
        self.round: Round | None = None
        self.owed_ms = 0.0  # spent in claims since the clock last moved
        self.busy_ms = self.samples = 0.0
        self.merged_ms = 0.0
        self.costs = Row()
        self.has_stopped = False
        self.wandering = (0, 1.0)
        self.most_lead = 0

    def life(self) -> Life:
        yield from self._boundary()
        idle = 0
        for slot in self._feed():
            yield from self._pay()
            if slot is not None:
                yield from self._train(slot)
                self.course.trained()
                self.most_lead = max(self.most_lead, self.course.lead if self.course.in_flight else 0)
            before = self.windows.rounds, self.course.in_flight
            yield from self._boundary()
            has_moved = slot is not None or before != (self.windows.rounds, self.course.in_flight)
            idle = 0 if has_moved else idle + 1
            assert idle <= self.cluster.lookahead + 1, "nothing to train and nothing to enter: a hang"

    def _feed(self) -> Iterator[int | None]:
        """Slots in the order handed out, with as many asked for ahead as a loader with workers does."""
        ahead = deque(self.course.hand() for _ in range(self.cluster.lookahead))
        while not self.course.is_over:
            ahead.append(self.course.hand())
            yield ahead.popleft()

    def _boundary(self) -> Life:
        course = self.course
        while not course.is_over:
            if course.in_flight:
                assert self.round is not None
                if not course.may_merge(self.round.arrival_ms <= self.sim.now_ms):
                    break
                yield from self._pay()
                yield from self._merge(self.round)
                continue
            if not course.is_due():
                break
            yield from self._pay()
            yield from self._enter()
        yield from self._pay()

    def _enter(self) -> Life:
        course, windows = self.course, self.windows
        row = self.costs._replace(
            next_slot=float(course.next_slot),
            samples=self.samples,
            busy_ms=self.busy_ms,
            divergence=self.cluster.divergence(windows.rounds, windows.anchor),
            fingerprint=float(windows.fingerprint()),
        )
        self.busy_ms = self.samples = 0.0
        course.enter()
        self.round = self.sim.round(windows.rounds, windows.due)
        self.sim.join(self.round, self.rank, row)
        is_blocking = windows.is_blocking
        yield self.cluster.touch_ms
        if is_blocking:
            yield from self._merge(self.round)

    def _merge(self, round_: Round) -> Life:
        began_ms = self.sim.now_ms
        if round_.arrival_ms > began_ms:
            yield round_
        waited_ms = self.sim.now_ms - began_ms
        entered_ms, window_ms = round_.entered[self.rank], round_.entered[self.rank] - self.merged_ms
        if self.sim.terms.is_async:
            wait_ms, transfer_ms = waited_ms, 2 * self.cluster.touch_ms
        else:
            wait_ms = round_.complete_ms - entered_ms
            transfer_ms = round_.arrival_ms - round_.complete_ms + self.cluster.touch_ms
        self.sim.note(round_, self.windows)
        self.course.merged()
        round_.merged[self.rank] = self.sim.now_ms
        yield self.cluster.touch_ms
        self.merged_ms = self.sim.now_ms
        self.costs = Row(
            window_ms=window_ms,
            wait_ms=wait_ms,
            transfer_ms=transfer_ms,
            latency_ms=round_.arrival_ms - entered_ms,
        )

    def _train(self, slot: int) -> Life:
        cluster, start_ms = self.cluster, self.sim.now_ms
        samples = cluster.samples(slot)
        ms = self._slot_ms(slot) * samples / cluster.slot_size
        stop_ms = self._stop_ms(slot)
        yield ms + stop_ms
        self.busy_ms += ms + stop_ms
        self.samples += samples
        self.sim.outcome.useful_ms += ms
        self.sim.outcome.work.append((slot, self.rank, start_ms, self.sim.now_ms))

    def _slot_ms(self, slot: int) -> float:
        cluster, rng = self.cluster, self.rng
        ms = cluster.slot_ms[self.rank]
        if cluster.change is not None and cluster.change[0] == self.rank and slot >= cluster.change[1]:
            ms *= cluster.change[2]
        if rng.random() < cluster.spikes:
            ms *= 3.0
        if cluster.wander:
            left, factor = self.wandering
            self.wandering = (left - 1, factor)
            if left == 0:
                self.wandering = (rng.randint(5, 100), 1.0 + rng.uniform(-cluster.wander, cluster.wander))
            ms *= self.wandering[1]
        return ms * (1.0 + rng.uniform(-cluster.jitter, cluster.jitter))

    def _stop_ms(self, slot: int) -> float:
        stop = self.cluster.stop
        if stop is None or self.has_stopped or stop[0] != self.rank or slot < stop[1]:
            return 0.0
        self.has_stopped = True
        return stop[2]

    def _claim(self, many: int) -> int:
        self.owed_ms += self.cluster.claim_ms
        return self.sim.claim(many)

    def _pay(self) -> Life:
        if self.owed_ms:
            owed_ms, self.owed_ms = self.owed_ms, 0.0
            yield owed_ms


def check(outcome: Outcome) -> None:
    """What must hold in every run, whatever the cluster."""
    cluster, rounds = outcome.cluster, outcome.rounds
    assert sorted(slot for slot, *_ in outcome.work) == list(range(cluster.total)), "not every slot exactly once"
    dues = [round_.due for round_ in rounds]
    assert dues == sorted(set(dues)), "rounds out of axis order"
    assert dues[-1] == cluster.total, "the last round is not at the end"
    assert all(row.next_slot == cluster.total for row in rounds[-1].rows.values()), "a rank left slots"
    ranks = len(cluster.slot_ms)
    assert all(len(round_.merged) == ranks for round_ in rounds), "a rank missed a round"
    event = 0
    while event < cluster.total:
        event = cluster.next_event(event)
        assert event in dues, "an event without a round"
        met_ms = rounds[dues.index(event)].arrival_ms
        assert all((end <= met_ms) if slot < event else (start >= met_ms) for slot, _, start, end in outcome.work), (
            "a slot on the wrong side of an event"
        )
