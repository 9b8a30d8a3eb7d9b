"""One rank's way along the axis in the local policies: its next slot, when it enters a round, when it must wait.

Cadence cuts a window's slots by the counts; async lets ranks claim slots, first come first served, from one count
they share. Pure bookkeeping: whoever drives it (a pace, a simulation) trains, averages and keeps the clock.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from uneven.policy.windows import Windows

CLAIM_SHARE = 0.01  # a claim may cost this part of the time of what it claims


@dataclass
class SlotSchedule:
    """`claim(n)` takes the next n of a count that all ranks share and returns the first; None for cadence.

    A slot is *given* to the rank, then *handed* to its feed (which may read ahead), then trained. A rank passes an
    event only when it holds no slot before it. It enters any other round when the claims of all ranks have come to it,
    as far as it knows, so that what one rank still holds does not keep the others waiting.
    """

    windows: Windows
    rank: int
    total: int
    claim: Callable[[int], int] | None
    max_staleness: int | None = None
    claim_ms: float = 0.0  # what a claim costs, as measured
    in_flight: bool = False  # a round that was entered and not merged
    parts: int = 0  # trained by this rank
    staleness: int = 0  # trained since it entered the round in flight
    _given: deque[int] = field(default_factory=deque)
    _handed: int = 0
    _window: int = -1  # the window whose cut was last given
    _base: int | None = None  # the slot that the shared count's 0 stands for
    _claimed: int = 0  # the first slot of the last claim
    _since: int = 0  # trained since that claim

    @property
    def is_over(self) -> bool:
        return self.windows.is_over

    @property
    def next_slot(self) -> int:
        """The first slot that this rank has still to train; where it has none, the end of what could be."""
        if not self._given:
            self._take()
        if self._given:
            return self._given[0]
        return self.windows.due if self._is_cut else self.total

    def hand(self) -> int | None:
        """The next slot for the feed; None when something else comes first: a round, an event, the end."""
        if self._handed == len(self._given):
            self._take()
        if self._handed == len(self._given):
            return None
        slot = self._given[self._handed]
        if slot >= self.windows.event:
            return None  # a claim past the event is kept until the event is passed
        self._handed += 1
        return slot

    def trained(self) -> None:
        """The first slot handed out is trained."""
        self._given.popleft()
        self._handed -= 1
        self.parts += 1
        self.staleness += 1
        self._since += 1

    def is_due(self) -> bool:
        """Whether this rank enters the next round now."""
        if self.in_flight or self.is_over:
            return False
        if self.next_slot >= self.windows.due:
            return True
        is_event = self.windows.due == self.windows.event
        return not self._is_cut and not is_event and self._front >= self.windows.due

    def enter(self) -> None:
        self.in_flight, self.staleness = True, 0

    def may_merge(self, has_arrived: bool) -> bool:
        """At a boundary with a round in flight: merge now? Without the average this means waiting for it."""
        return has_arrived or self.staleness >= self._most_lead or self.next_slot >= self.windows.event

    def merged(self) -> None:
        """The round is merged, and `windows` has noted it."""
        self.in_flight = False

    @property
    def _front(self) -> int:
        """How far all ranks have claimed, as far as this one knows: its own last claim, and its pace since then."""
        return self._claimed + int(self._since / self._share)

    @property
    def _is_cut(self) -> bool:
        return self.claim is None or not self.windows.is_measured

    @property
    def _most_lead(self) -> int:
        return self.max_staleness or 2 * self.windows.counts[self.rank]

    @property
    def _share(self) -> float:
        """This rank's part of all slots, as far as is known."""
        return self.windows.counts[self.rank] / sum(self.windows.counts)

    def _take(self) -> None:
        """Get more slots, where there are any for this rank now."""
        if self._is_cut:
            if self._window < self.windows.rounds:
                self._window = self.windows.rounds
                counts = self.windows.cut()
                first = self.windows.start + sum(counts[: self.rank])
                self._given.extend(range(first, first + counts[self.rank]))
            return
        assert self.claim is not None, "cadence is always cut"
        if self._base is None:
            self._base = self._claimed = self.windows.start
            self._since = 0
        many = self._claim_size()
        if many == 0:
            return
        self._claimed, self._since = self._base + self.claim(many), 0
        self._given.extend(range(self._claimed, min(self._claimed + many, self.total)))

    def _claim_size(self) -> int:
        """Enough slots to make the claim cheap, far fewer than the window's, and before an event only its part."""
        left = self._share * (self.windows.event - self._front)
        if self._claimed >= self.total or (self._given and len(self._given) >= left):
            return 0
        ms = 1.0 / self.windows.speeds[self.rank]
        enough = int(self.claim_ms / (CLAIM_SHARE * ms)) + 1
        return max(1, min(enough, self.windows.counts[self.rank] // 4, int(0.5 * left)))
