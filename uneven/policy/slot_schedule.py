"""The slots of one rank in the local policies: which slot is next, when it enters a round, when it must wait.

Cadence divides a window's slots by the counts; async lets ranks claim slots, first come first served, from one counter
they share (policy/claims.py has how many). Pure bookkeeping: the caller (train/local_sgd.py, or the simulation in
tests/policy) trains, averages and keeps the clock.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from uneven.policy.claims import MIN_TRIP_MS, Claiming, ClaimsAhead
from uneven.policy.late import RECENT, is_late, recent_time
from uneven.policy.round_report import RoundReport
from uneven.policy.windows import Windows


def first_free_slot(reports: Sequence[RoundReport], event: int) -> int:
    """The first slot that may become an event for a wish in this round: no rank is past it when it learns of it.

    Every rank computes it from the same reports, when it merges the round, and makes it an event by
    Windows.learn_event. Until then a rank goes on training, and how far is not known by claims alone: a rank that stood
    still before a claim, while the others merged and went on, would get slots beyond any number fixed beforehand. So
    each rank sets itself a limit when it enters the round, and reports it. The bound: a slot that a rank hands out
    before it has merged the round is (1) one it had handed out before it entered, which lies below its limit, since
    that counts from its last claim; (2) one it handed out since, and `hand` gives none from the limit on while a round
    is in flight. So it lies below the largest limit. A claim on its way when the rank enters has no number yet, and is
    of the second kind. `event`, the next one that all ranks know, serves as well where it comes first, since no rank
    passes it before a round there, which is this one or a later one.
    """
    return min(event, int(max(report.limit for report in reports)))


@dataclass
class SlotSchedule:
    """`claim(n)` takes the next n numbers of a counter that all ranks share and returns the first; None for cadence.

    `ahead` does the same while the rank trains, where waiting for a claim costs too much; without it all are waited
    for. At most one claim is on its way, so a rank's numbers only grow: what is on its way lies past all slots held.

    A slot is *given* to the rank, then *handed* to its feed (which may read ahead), then trained. A rank passes an
    event only when it holds no slot before it. It enters any other round when, as far as it knows, the claims of all
    ranks have reached that round, so that slots still held by one rank do not keep the others waiting.
    """

    windows: Windows
    rank: int
    total: int
    claim: Callable[[int], int] | None
    max_staleness: int | None = None
    claim_ms: float = 0.0  # measured cost of a claim, where `ahead` does not measure it
    in_flight: bool = False  # a round was entered and is not merged yet
    parts: int = 0  # trained by this rank
    staleness: int = 0  # trained since it entered the round in flight
    lookahead: int = 0  # slots that its feed reads ahead
    end: int | None = None  # of a stream without length, as this rank was told: it stops there until all ranks know
    ahead: ClaimsAhead | None = None
    _slots: deque[int] = field(default_factory=deque)
    _handed: int = 0
    _window: int = -1  # the last window of which it has its slots
    _on_its_way: int = 0  # slots of the claim that is not answered yet
    _base: int | None = None  # the slot at which the shared counter was 0
    _claimed: int = 0  # the first slot of the last claim
    _claimed_stop: int = 0  # the end of the last claim
    _since: int = 0  # trained since that claim
    _limit: int | None = None  # with a round in flight: no slot from it on is handed out before that is merged
    _skipped_to: int = 0  # slots before it were left out: claims of them are dropped
    _is_mixed: bool = False  # unfinished slots of an earlier window come first, and may be higher than newer ones
    _lowest_returned: int | None = None  # of the slots handed back since the last round
    _planned_ms: float = 0.0  # of the window, where late ranks hand slots back
    _busy_ms: float = 0.0  # of the slots trained since it entered a round
    _recent_ms: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    @property
    def is_over(self) -> bool:
        return self.windows.is_over

    @property
    def next_slot(self) -> int:
        """The first slot that this rank has still to train; without one, the end of the slots it could get."""
        if not self._slots and self._lowest_returned is None:
            self._take()
        if not self._slots:
            if self._lowest_returned is not None:
                return self._lowest_returned
            return self.windows.due if self._is_divided or self._is_left_out else self.total
        first = min(self._slots) if self._is_mixed else self._slots[0]
        return first if self._lowest_returned is None else min(first, self._lowest_returned)

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots that this rank has still to train."""
        return tuple(self._slots)

    def hand(self) -> int | None:
        """The next slot for the feed; None when a round, an event or the end comes first.

        None, too, while a claim is on its way and the feed still has slots to train.
        """
        if self._on_its_way and self.ahead is not None and self.ahead.is_there():
            self._receive()
        if self._handed == len(self._slots):
            self._ask_ahead() if self._has_time else self._take()
        if self._handed == len(self._slots):
            return None
        slot = self._slots[self._handed]
        if slot >= self._barrier:
            return None  # a claim past the event is kept until the event is passed
        self._handed += 1
        self._ask_ahead()
        return slot

    def put_back(self, end: int) -> None:
        """The slot handed out last lies past the end of the stream's epoch: it is kept for the next epoch."""
        self._handed -= 1
        self.end = end

    def trained(self, ms: float = 0.0) -> None:
        """The first slot handed out is trained, and took so long."""
        self._busy_ms += ms
        self._recent_ms.append(ms)
        self._slots.popleft()
        self._handed -= 1
        self.parts += 1
        self.staleness += 1
        self._since += 1

    def drop_before(self, slot: int) -> None:
        """Leave out all slots before this event, whoever has them; on all ranks, before `windows` notes the round."""
        self._slots = deque(held for held in self._slots if held >= slot)
        self._handed = 0
        self._skipped_to = slot
        self.windows.end_at(slot)

    @property
    def is_late(self) -> bool:
        """Whether the others would wait long for this rank, see policy/late.py; `hand_back` then comes with the round.

        Before an event it is only worth a round where there is something to hand back.
        """
        windows, held = self.windows, len(self._slots)
        if self.in_flight or not held or not self._recent_ms or self._busy_ms < self._planned_ms:
            return False
        if windows.due == windows.event and held == self._handed:
            return False
        return is_late(self._busy_ms, self._planned_ms, held, recent_time(self._recent_ms) or self._recent_ms[-1])

    def hand_back(self) -> dict[str, float]:
        """Just before it enters a round: hand back what its feed has not got, if it is late; fields of its report."""
        if not self.is_late:
            return {}
        back = [self._slots.pop() for _ in range(len(self._slots) - self._handed)]
        self._lowest_returned = min(back, default=None)
        recent_ms = recent_time(self._recent_ms)
        return {"returned": float(len(back)), "kept": float(len(self._slots)), "recent_ms": recent_ms}

    def is_due(self) -> bool:
        """Whether this rank enters the next round now."""
        if self.in_flight or self.is_over:
            return False
        if self.next_slot >= min(self.windows.due, self._barrier) or self.is_late:
            return True
        is_event = self.windows.due == self.windows.event
        return not self._is_divided and not is_event and self._front >= self.windows.due

    def set_limit(self) -> int:
        """Just before it enters a round: the limit that this rank then keeps, for its report. See first_free_slot.

        A rank that waits for the average has nothing beyond the round's slot. Any other goes on up to the limit, which
        is far enough away to be no hindrance: how far all ranks get while this one, at its speed, trains what its
        staleness allows, what its feed reads ahead and a claim more. That is little more than two windows.
        """
        self._limit = self.windows.due
        if not self._is_divided and not self.windows.is_blocking:
            self._limit = max(self.windows.due, self._claimed_stop, self._front)
            if not self._is_left_out:
                own = self._max_staleness + self.lookahead + self._claiming.most_held
                self._limit += math.ceil(own / self._share)
        return self._limit

    def await_claim(self) -> None:
        """Wait for the claim on its way, if there is one: just before a round in which all ranks meet.

        What is claimed after that lies past the event, whoever claims it, and the last round leaves nothing on its way.
        """
        if self._on_its_way:
            self._receive()

    def enter(self) -> None:
        self.in_flight = True
        self.staleness = 0
        self._busy_ms = 0.0

    def may_merge(self, has_arrived: bool) -> bool:
        """At a boundary with a round in flight: merge now? Without the average this means waiting for it."""
        if has_arrived or self.staleness >= self._max_staleness or self.next_slot >= self._barrier:
            return True
        return self._is_left_out and not self._slots  # it gets nothing more before that

    def merged(self) -> None:
        """The round is merged, and `windows` has noted it."""
        self.in_flight = False
        self._limit = None
        self._lowest_returned = None
        if self.end is not None and self.windows.last_event >= self.end:
            self.end = None
        if not self._is_divided:
            self._start_claims()
        if not self.is_over:
            self._ask_ahead()  # after an event: an evaluation or a save may follow, and the reply comes meanwhile

    @property
    def _barrier(self) -> int:
        """The slot that this rank must not pass before all ranks have got there, or before it has merged."""
        barrier = self.windows.event
        if self.end is not None and self.end < barrier:
            barrier = self.end
        return barrier if self._limit is None else min(barrier, self._limit)

    @property
    def _front(self) -> int:
        """Estimate of the last slot claimed by any rank: this rank's last claim, and its own speed since then."""
        return self._claimed if self._is_left_out else self._claimed + int(self._since / self._share)

    @property
    def _is_divided(self) -> bool:
        return self.claim is None or not self.windows.is_measured

    @property
    def _max_staleness(self) -> int:
        return self.max_staleness or 2 * self._count

    @property
    def _count(self) -> int:
        """This rank's slots of a window; one where it is tried, or has still to train what it claimed."""
        return max(1, self.windows.counts[self.rank])

    @property
    def _is_left_out(self) -> bool:
        """Whether this rank claims nothing in this window."""
        return self.windows.is_left_out(self.rank) and not self._is_divided and not self.windows.is_probed(self.rank)

    @property
    def _share(self) -> float:
        """This rank's fraction of all slots, by the current counts."""
        counts, count = self.windows.counts, self._count
        return count / (sum(counts) - counts[self.rank] + count)

    def _take(self) -> None:
        """Get more slots, if this rank may have some now."""
        if self._is_divided:
            if self._window < self.windows.rounds:
                self._window = self.windows.rounds
                self._is_mixed = bool(self._slots)
                self._slots.extend(self.windows.slots_of(self.rank))
                self._planned_ms = self.windows.planned_ms if self.windows.hands_back else 0.0
            return
        self._start_claims()  # also where it is left out from the start, as in a run that is resumed
        if self._is_left_out and not self._on_its_way:
            return
        while True:
            if self._on_its_way:
                self._receive()
            elif (count := self._claim_size()) == 0:
                return
            else:
                assert self.claim is not None, "cadence has no claims"
                self._keep(self.claim(count), count)
            if self._claimed_stop > self._skipped_to:
                return

    @property
    def _has_time(self) -> bool:
        """Whether a claim can come while the rank trains what its feed has got."""
        return bool(self._slots) and not self._is_divided and (self._on_its_way > 0 or self._claiming.is_ahead)

    def _ask_ahead(self) -> None:
        """Send the next claim, if the slots held will not last until it is answered."""
        if self.ahead is None or self._on_its_way or self.ahead.trip_ms <= MIN_TRIP_MS:
            return  # near the store claims are waited for: `Claiming.is_ahead`
        if self._is_divided or self._claimed >= self.total or self._is_left_out:
            return
        if self._slots and self._slots[-1] >= self._barrier:
            return  # nothing before the barrier is left for this rank
        held = len(self._slots)
        self._on_its_way = self._claiming.size_to_ask(held, held - self._handed)
        if self._on_its_way:
            self.ahead.ask(self._on_its_way)

    def _receive(self) -> None:
        """Take the claim on its way; waits until it is there."""
        assert self.ahead is not None, "who asked ahead?"
        count = self._on_its_way
        self._on_its_way = 0
        self._keep(self.ahead.take(), count)

    def _keep(self, first: int, count: int) -> None:
        """Numbers of the counter, as slots: without those that were left out, and those past the end."""
        self._claimed, self._since = self._start_claims() + first, 0
        self._claimed_stop = self._claimed + count
        self._slots.extend(range(max(self._skipped_to, self._claimed), min(self._claimed_stop, self.total)))

    def _start_claims(self) -> int:
        """The slot at which the counter of claims was 0: set after the same round on all ranks, whatever they hold."""
        if self._base is None:
            self._base = self._claimed = self.windows.start
            self._since = 0
        return self._base

    @property
    def _claiming(self) -> Claiming:
        trip_ms = self.claim_ms if self.ahead is None else self.ahead.trip_ms
        slot_ms, count = self.windows.slot_time_ms(self.rank), self._count
        left = self._share * (self.windows.event - self._front)
        return Claiming(trip_ms, slot_ms, count, left, can_ask=self.ahead is not None)

    def _claim_size(self) -> int:
        """How many slots this rank claims now and waits for; none where it holds its part of what is left."""
        claiming = self._claiming
        if self._claimed >= self.total or (self._slots and len(self._slots) >= claiming.left):
            return 0
        return claiming.size
