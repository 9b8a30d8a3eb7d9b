"""Policies that repeat an earlier run: its shares slot by slot, or its rounds. Nothing is measured or decided.

data/replay.py reads them from a run's folder. With the same slots, entries and merges in the same order on every rank,
a run of a local policy repeats itself bit by bit (tests/train/test_replay.py).
"""

import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from uneven.policy.exact import Move
from uneven.policy.round_report import RoundReport
from uneven.policy.windows import Decision


@dataclass(frozen=True)
class RecordedShares:
    """An exact policy: `plan[slot]` holds every rank's samples. An evaluation after the last slot takes those of it."""

    plan: tuple[tuple[int, ...], ...]

    def shares(self, slot: int, samples: int) -> tuple[int, ...]:
        del samples
        return self.plan[min(slot, len(self.plan) - 1)]

    def note(self, slot: int, samples: int, busy_ms: Sequence[float]) -> Move | None:
        del slot, samples, busy_ms
        return None

    def fingerprint(self) -> int:
        return self._fingerprint

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        del state

    @cached_property
    def _fingerprint(self) -> int:
        return zlib.crc32(repr(self.plan).encode()) & 0xFFFFFF  # read every step, so computed once


class Round(NamedTuple):
    """One round as a rank went through it, counted in the parts it had trained; the first is round 0."""

    due: int
    entered: int
    merged: int
    scale: float


@dataclass
class RecordedWindows:
    """Takes the place of Windows: rounds are due where they were."""

    recorded: Sequence[Round]
    ranks: int
    next_event: Callable[[int], int]
    speeds: list[float]
    rounds: int = 0
    start: int = 0
    event: int = 0
    anchor: float = 0.0
    is_over: bool = False
    last_event: int = 0
    is_blocking: bool = False  # RecordedSchedule knows which rounds were
    is_measured: bool = True
    stop_rounds: frozenset[int] = frozenset()  # after which the recorded run was stopped and saved

    def __post_init__(self) -> None:
        self.event = self.next_event(0)

    @property
    def due(self) -> int:
        return self.recorded[min(self.rounds + 1, len(self.recorded) - 1)].due

    @property
    def was_stopped(self) -> bool:
        """Whether the recorded run was stopped after the round just noted."""
        return self.rounds in self.stop_rounds

    @property
    def scale(self) -> float:
        """The factor on the learning rates since the last round that is done."""
        return self.recorded[min(self.rounds, len(self.recorded) - 1)].scale

    def slot_time_ms(self, rank: int) -> float:
        """Not in ms: a replay measures nothing."""
        return 1.0 / max(1.0, self.speeds[rank])

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(max(1, int(speed)) for speed in self.speeds)

    def note(self, reports: Sequence[RoundReport]) -> list[Decision]:
        # A round that stopped the run may come before the event that it was due at.
        if self.due == self.event and min(report.next_slot for report in reports) >= self.event:
            self.last_event = self.event
            self.event = self.next_event(self.last_event)
            self.is_over = self.event == self.last_event
        self.start = max(int(report.next_slot) for report in reports)
        self.rounds += 1
        return []

    def fingerprint(self) -> int:
        return self.rounds


@dataclass
class RecordedSchedule:
    """Takes the place of SlotSchedule: the rank's own slots in order, entering and merging between the same slots."""

    windows: RecordedWindows
    slots: deque[int]
    total: int
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

    def trained(self, ms: float = 0.0) -> None:
        del ms
        self._handed.popleft()
        self.parts += 1
        self.staleness += 1

    def is_due(self) -> bool:
        return not self.in_flight and not self.is_over and self.parts >= self._next.entered

    def hand_back(self) -> dict[str, float]:
        """A rank that was late then is so now, by its log."""
        return {}

    def set_limit(self) -> int:
        """No limit: a replay asks for nothing, and its events are in the log."""
        return self.total

    def await_claim(self) -> None:
        """Nothing is claimed in a replay."""

    def enter(self) -> None:
        self.in_flight = True
        self.staleness = 0

    def may_merge(self, has_arrived: bool) -> bool:
        del has_arrived
        return self.parts >= self._next.merged

    def merged(self) -> None:
        self.in_flight = False

    @property
    def _next(self) -> Round:
        return self.windows.recorded[min(self.windows.rounds + 1, len(self.windows.recorded) - 1)]
