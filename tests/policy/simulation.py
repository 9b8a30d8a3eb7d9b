"""A cluster on a simulated clock, whose ranks drive `Windows` and `SlotSchedule` as the ranks of a real run do.

Every rank is a generator with its own slot schedule and its own copy of the controller. It yields how long it is busy,
or the round whose average it waits for. What must hold in any run (every slot once, events respected, copies equal,
no rank stuck) is checked here and in run_checks.py; tests look at the rest.
"""

import heapq
import json
import random
from collections import deque
from collections.abc import Callable, Container, Generator, Iterator
from typing import Any

from tests.policy.cluster import NEVER, Cluster, Outcome, Round
from tests.policy.run_checks import check, check_stream
from uneven.policy.axis import Axis
from uneven.policy.claims import typical_ms
from uneven.policy.round_report import RoundReport
from uneven.policy.slot_schedule import SlotSchedule, first_free_slot
from uneven.policy.stream_axis import UNKNOWN, StreamAxis
from uneven.policy.stream_end import StreamEnd
from uneven.policy.windows import LocalSGDConfig, Windows

END = -1
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
        self._acts: list[Callable[[], None]] = []  # what happens at a moment of its own, not in a rank's life
        self._ranks = [_Rank(self, rank, hints, max_staleness) for rank in range(cluster.ranks)]

    def run(self) -> Outcome:
        lives = [rank.life() for rank in self._ranks]
        left = len(lives)
        while self._queue:
            now_ms, rank = heapq.heappop(self._queue)
            if rank < 0:
                self._acts[-1 - rank]()
                continue
            self.now_ms = now_ms
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

    def at(self, ms: float, act: Callable[[], None]) -> None:
        self._acts.append(act)
        heapq.heappush(self._queue, (ms, -len(self._acts)))

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
        self._trips = _Trips(self) if config.is_async and cluster.trip_ms is not None else None
        self.slot_schedule.ahead = self._trips
        self._handed_stop = 0
        self.round = Round(0)  # the last one entered
        self.most_lead = 0
        self._rng = random.Random(f"{cluster.seed} {rank}")
        self.owed_ms = 0.0  # spent on claims since the clock last moved
        self._busy_ms = self._samples = 0.0
        self._costs = RoundReport()
        self._has_stopped = False
        self._spell = (0, 1.0)  # slots left, factor

    @property
    def is_over(self) -> bool:
        return self.slot_schedule.is_over or self.windows.last_event >= self.simulation.outcome.stop

    def life(self) -> Life:
        yield from self._boundary()
        idle, feed = 0, self._feed()
        while True:
            if self._freezes():
                yield self.cluster.freeze[2]  # type: ignore[index]
            slot = next(feed, END)
            if slot is END:
                return
            if self.owed_ms:
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
        if self.owed_ms:
            yield self._paid_ms()

    def _enter(self) -> Life:
        if self.windows.is_blocking:
            self.slot_schedule.await_claim()
        row = self._costs._replace(
            **self.slot_schedule.hand_back(),
            next_slot=float(self.slot_schedule.next_slot),
            samples=self._samples,
            busy_ms=self._busy_ms,
            fingerprint=float(self.windows.fingerprint()),
            end_samples=float(self.stream_end.samples),
            limit=float(self.slot_schedule.set_limit()),
        )
        assert not (self.windows.is_blocking and self.slot_schedule._on_its_way), "a claim on its way at an event"
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
        passed = self.windows.last_event
        one.handed[self.rank] = self._handed_stop
        one.free = first_free_slot(rows, self.windows.event)
        if self.windows.rounds in self.simulation.wishes:
            self._requested.add(one.free)
            self.windows.learn_event(one.free)
            self.simulation.outcome.requested.add(one.free)
        self.simulation.note(one, self.windows)
        self.slot_schedule.merged()
        if self.windows.last_event != passed:
            self.stream_end.passed()
            self.epoch += 1
        yield touch_ms

    def _slot_ms(self, slot: int) -> float:
        """What the slot takes, a stop apart; only then it is useful and busy time."""
        cluster, rng = self.cluster, self._rng
        ms = cluster.slot_ms[self.rank] * cluster.samples(slot) / cluster.slot_size
        ms *= 1.0 + rng.uniform(-cluster.jitter, cluster.jitter)
        if cluster.change is not None and cluster.change[0] == self.rank:
            ms *= cluster.change[2] if cluster.change[1] <= slot < (cluster.recovers or cluster.total) else 1.0
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
        self.slot_schedule.trained(self.simulation.now_ms - self._start_ms)
        if self.slot_schedule.in_flight:
            self.most_lead = max(self.most_lead, self.slot_schedule.staleness)

    def _claim(self, many: int) -> int:
        if self._trips is not None:
            self._trips.ask(many)
            return self._trips.take()
        self.owe(self.cluster.claim_ms)
        return self.simulation.claim(many)

    def owe(self, ms: float) -> None:
        self.owed_ms += ms
        self.simulation.outcome.claims_ms += ms

    def _paid_ms(self) -> float:
        owed_ms, self.owed_ms = self.owed_ms, 0.0
        return owed_ms


class _Trips:
    """A rank's claims on their way: the counter gets each half a round trip after it was sent."""

    def __init__(self, rank: _Rank) -> None:
        self._rank, self._rng = rank, random.Random(f"{rank.cluster.seed} {rank.rank} trips")
        self._seen: list[float] = []
        self._numbers: list[int | None] = []
        self._count, self._arrival_ms = 0, 0.0

    @property
    def trip_ms(self) -> float:
        return typical_ms(self._seen[1:])  # as train/policies.py does

    def ask(self, count: int) -> None:
        cluster = self._rank.cluster
        assert cluster.trip_ms is not None
        assert None not in self._numbers, "two claims on their way"
        ms = cluster.trip_ms * (1.0 + self._rng.uniform(-cluster.trip_jitter, cluster.trip_jitter))
        ms *= 50.0 if self._rng.random() < cluster.late else 1.0
        place = len(self._numbers)
        self._numbers.append(None)
        self._seen.append(ms)
        self._count, self._arrival_ms = count, self._now_ms + ms
        self._rank.simulation.at(self._now_ms + 0.5 * ms, lambda: self._reach(place))

    def is_there(self) -> bool:
        return self._arrival_ms <= self._now_ms

    def take(self) -> int:
        self._reach(len(self._numbers) - 1)
        self._rank.owe(max(0.0, self._arrival_ms - self._now_ms))
        number = self._numbers[-1]
        assert number is not None
        return number

    @property
    def _now_ms(self) -> float:
        return self._rank.simulation.now_ms + self._rank.owed_ms

    def _reach(self, place: int) -> None:
        """The claim is at the counter: at its time, or as soon as its rank waits for it."""
        if self._numbers[place] is None:
            self._numbers[place] = self._rank.simulation.claim(self._count)
