"""The rounds of an earlier run: who trained what, entered where and merged when. Nothing is measured or decided.

With the order of slots, entries and merges the same on every rank, a run of a local policy repeats itself bit by bit.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from uneven.policy.windows import Decision, Row


class Round(NamedTuple):
    """One round as a rank went through it, counted in the parts it had trained; the first is round 0."""

    due: int
    entered: int
    merged: int
    scale: float


@dataclass
class RecordedWindows:
    """Stands in for Windows: rounds are due where they were."""

    rounds_then: Sequence[Round]
    ranks: int
    next_event: Callable[[int], int]
    speeds: list[float]
    rounds: int = 0
    start: int = 0
    event: int = 0
    anchor: float = 0.0
    is_over: bool = False
    is_blocking: bool = False  # the course knows which rounds were
    is_measured: bool = True

    def __post_init__(self) -> None:
        self.event = self.next_event(0)

    @property
    def due(self) -> int:
        return self.rounds_then[min(self.rounds + 1, len(self.rounds_then) - 1)].due

    @property
    def scale(self) -> float:
        """Of the learning rates, since the last round that is done."""
        return self.rounds_then[min(self.rounds, len(self.rounds_then) - 1)].scale

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(max(1, int(speed)) for speed in self.speeds)

    def note(self, rows: Sequence[Row]) -> list[Decision]:
        if self.due == self.event:
            following = self.next_event(self.event)
            self.is_over, self.event = following == self.event, following
        self.start = max(int(row.next_slot) for row in rows)
        self.rounds += 1
        return []

    def fingerprint(self) -> int:
        return self.rounds


@dataclass
class RecordedSchedule:
    """Stands in for Course: the rank's own slots in their order, entries and merges between the same two of them."""

    windows: RecordedWindows
    slots: deque[int]
    total: int
    claim_ms: float = 0.0
    in_flight: bool = False
    parts: int = 0
    staleness: int = 0
    _handed: deque[int] = field(default_factory=deque)

    @property
    def is_over(self) -> bool:
        return self.windows.is_over

    @property
    def next_slot(self) -> int:
        waiting = self._handed or self.slots
        return waiting[0] if waiting else self.total

    def hand(self) -> int | None:
        """The next slot for the feed; None where a round, an event or the end comes first."""
        # A rank may have entered its first round before it trained anything.
        if self.is_due() or not self.slots or self.slots[0] >= self.windows.event:
            return None
        self._handed.append(self.slots.popleft())
        return self._handed[-1]

    def trained(self) -> None:
        self._handed.popleft()
        self.parts += 1
        self.staleness += 1

    def is_due(self) -> bool:
        return not self.in_flight and not self.is_over and self.parts >= self._next.entered

    def enter(self) -> None:
        self.in_flight, self.staleness = True, 0

    def may_merge(self, has_arrived: bool) -> bool:
        del has_arrived
        return self.parts >= self._next.merged

    def merged(self) -> None:
        self.in_flight = False

    @property
    def _next(self) -> Round:
        return self.windows.rounds_then[min(self.windows.rounds + 1, len(self.windows.rounds_then) - 1)]
