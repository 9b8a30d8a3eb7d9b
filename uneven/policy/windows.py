"""Windows and rounds: how long ranks train by themselves before their params are averaged, and who takes how much.

The controller of the local policies. It is replicated: every rank feeds the same rows to its own copy, in round order,
and gets the same windows; it reads nothing else and uses only + - * / and comparisons. The slowest rank does `anchor`
slots a window and the others as many as their speed allows, so that all are done at the same moment (El Che: a column
marches at the pace of its slowest man). The anchor grows until rounds cost little, and the guard holds it back when
replicas drift apart.
"""

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from uneven.policy.finish import by_ratio

LATENCY_SHARE = 0.1  # async: what a round may take from snapshot to average, as a share of its window
COUNT_GAIN = 0.02  # counts change when slots are predicted to go so much faster
SETTLING = 2  # rounds at the start whose costs say nothing
MEMORY = 3  # rounds that an estimate looks back on: one odd one among them changes nothing


class Row(NamedTuple):
    """What one rank tells the others in a round. Costs are those of its last round: this one's are not known yet."""

    next_slot: float = 0.0  # its first slot that is not in this average
    samples: float = 0.0  # trained since its last round: its weight
    busy_ms: float = 0.0  # its own work for them
    transfer_ms: float = 0.0  # what snapshot and merge took of its own time
    latency_ms: float = 0.0  # from snapshot to average, waiting for others included
    loss_sum: float = 0.0
    loss_count: float = 0.0
    divergence: float = 0.0  # ||params - average|| / ||average|| at its last merge
    word: float = 0.0
    fingerprint: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """Something the controller changed: `kind` is counts, anchor or guard."""

    kind: str
    fields: dict[str, float | list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSGDConfig:
    """What the user may set about windows."""

    is_async: bool = False
    anchor: int = 10
    max_anchor: int = 200
    overhead_target: float = 0.03
    divergence_threshold: float = 0.05
    shares: tuple[float, ...] | None = None  # fixed ratio of the counts; nothing moves then


@dataclass
class Windows:
    """Invariant: `start` and `due` are the same on all ranks after the same round.

    `slot_ms` is every rank's time for a full slot, or None where nothing could be measured beforehand: then the first
    two windows give every rank one slot, and the second of them is measured. `next_event(slot)` is the first slot
    after `slot` where ranks must meet for another reason; the end of the run is the last one, and its own successor.
    """

    terms: LocalSGDConfig
    ranks: int
    slot_size: int
    next_event: Callable[[int], int]
    slot_ms: list[float] | None = None
    start: int = 0
    rounds: int = 0  # done, without round 0
    anchor: float = 0.0
    counts: tuple[int, ...] = ()
    is_over: bool = False  # the last round, at the end of the run, is done
    is_held: bool = False  # by the guard: the anchor may not grow
    event: int = 0  # the next slot at which all ranks meet whatever the window
    due: int = 0  # the slot of the next round
    _floor: float = 0.0  # of the anchor: the one asked for, unless the guard went below it
    _ms: list[float] = field(default_factory=list)
    _seen_ms: list[list[float]] = field(default_factory=list)  # per rank: a slot's time in its last windows
    _costs_ms: list[float] = field(default_factory=list)  # of the last rounds, in time of the ranks' own
    _blocked_ms: list[float] = field(default_factory=list)
    _latencies_ms: list[float] = field(default_factory=list)
    _divergences: list[float] = field(default_factory=list)  # rising ones, above the threshold

    def __post_init__(self) -> None:
        self._ms = list(self.slot_ms or [1.0] * self.ranks)
        self._seen_ms = [[ms] for ms in self.slot_ms] if self.slot_ms else [[] for _ in range(self.ranks)]
        self.anchor = self._floor = float(self.terms.anchor)
        self.counts = self._best_counts() if self.is_measured else (1,) * self.ranks
        self.event = self.next_event(0)
        self._open()

    @property
    def is_measured(self) -> bool:
        """Whether counts mean something yet; with fixed shares they always do."""
        return self.slot_ms is not None or self.rounds >= SETTLING or self.terms.shares is not None

    @property
    def is_blocking(self) -> bool:
        """Whether the round that is due waits for its average."""
        return not self.terms.is_async or self.due == self.event or not self.is_measured

    @property
    def speeds(self) -> list[float]:
        """Full slots per ms."""
        return [1.0 / ms for ms in self._ms] if self.terms.shares is None else list(self.terms.shares)

    def cut(self) -> tuple[int, ...]:
        """Every rank's slots of the window [start, due), in rank order."""
        length = self.due - self.start
        if length == sum(self.counts):
            return self.counts
        return by_ratio(self.speeds if self.is_measured else [1.0] * self.ranks, length)

    def note(self, rows: Sequence[Row]) -> list[Decision]:
        """A round is done: everybody's row, in rank order. Sets the next window; returns what it changed."""
        self.rounds += 1
        made: list[Decision] = []
        if self.terms.shares is None:
            self._follow(rows)
            made += self._guard(rows)
            made += self._set_anchor(rows)
            made += self._set_counts()
        stands = [int(row.next_slot) for row in rows]
        if self.due == self.event and min(stands) >= self.event:  # a round to stop the run may come before it
            following = self.next_event(self.event)
            self.is_over, self.event = following == self.event, following
        self.start = max(self.due, *stands)
        self._open()
        return made

    def fingerprint(self) -> int:
        """24 bits of the state: equal on all ranks."""
        numbers = struct.pack(f"<{self.ranks}d2d", *self._ms, self.anchor, self._floor)
        rest = (
            *(self.counts, self.start, self.due, self.event, self.rounds, self.is_held, self._seen_ms),
            *(self._divergences, self._costs_ms, self._blocked_ms, self._latencies_ms),
        )
        return zlib.crc32(numbers + repr(rest).encode()) & 0xFFFFFF

    def _open(self) -> None:
        left, length = self.event - self.start, sum(self.counts)
        if left <= length:
            self.due = self.event
        elif left < 2 * length:
            self.due = self.event - left // 2  # two equal windows: a small rest costs a round and splits badly
        else:
            self.due = self.start + length

    def _follow(self, rows: Sequence[Row]) -> None:
        """Each rank's ms per slot, from its last windows."""
        if self.slot_ms is None and self.rounds < SETTLING:
            return  # the very first step compiles and allocates
        for rank, row in enumerate(rows):
            if row.samples >= self.slot_size and row.busy_ms > 0:  # less than a slot says little
                self._move_ms(rank, row.busy_ms * self.slot_size / row.samples)
        known_ms = [ms for ms, seen in zip(self._ms, self._seen_ms, strict=True) if seen]
        for rank, seen in enumerate(self._seen_ms):
            if known_ms and not seen:
                self._ms[rank] = max(known_ms)  # it had no slot yet: no reason to trust it with many

    def _move_ms(self, rank: int, found_ms: float) -> None:
        """A large error is followed at once, a small one is mostly noise."""
        seen = self._seen_ms[rank]
        error = _remember(seen, found_ms) / self._ms[rank] - 1.0
        pull = 1.0 if len(seen) < MEMORY else min(1.0, max(0.2, 4.0 * abs(error)))
        self._ms[rank] *= 1.0 + pull * error

    def _guard(self, rows: Sequence[Row]) -> list[Decision]:
        """Three rises of the divergence above the threshold hold the anchor until it is below; more shrink it."""
        found = max(row.divergence for row in rows)
        if not found > self.terms.divergence_threshold:
            self.is_held, self._divergences = False, []
            self._floor = min(float(self.terms.anchor), self._floor + 1.0)
            return []
        is_rising = not self._divergences or found > self._divergences[-1]
        self._divergences = [*self._divergences, found] if is_rising else [found]
        was_held = self.is_held
        self.is_held |= len(self._divergences) >= 3
        if len(self._divergences) >= 5 and self.anchor > 1.0:
            self.anchor = max(1.0, self.anchor * 0.7)
            self._floor = min(self._floor, self.anchor)
            self._divergences = self._divergences[-3:]
        elif was_held or not self.is_held:
            return []
        return [Decision("guard", {"divergence": found, "anchor": self.anchor})]

    def _set_anchor(self, rows: Sequence[Row]) -> list[Decision]:
        """The anchor at which a round costs what it may.

        What a round costs in ms does not depend on its window, so the anchor needed follows from it, and nothing is
        steered by trial. A round that blocks costs what the rank that came last sees of it. The others' waiting is left
        out: what whole counts make of it is predicted, and the rest comes from wrong counts or noise, which longer
        windows hardly cure.
        """
        if self.rounds <= SETTLING + 1:
            return []
        slowest_ms, before = max(self._ms), self.anchor
        cost_ms = _remember(self._costs_ms, sum(row.transfer_ms for row in rows) / self.ranks)
        latency_ms = _remember(self._latencies_ms, sum(row.latency_ms for row in rows) / self.ranks)
        if self.terms.is_async:
            needed_ms = max(cost_ms / self.terms.overhead_target, latency_ms / LATENCY_SHARE)
        else:
            cost_ms += _remember(self._blocked_ms, min(row.latency_ms for row in rows))
            cost_ms += (1.0 - self._efficiency(self._best_counts())) * self.anchor * slowest_ms
            needed_ms = cost_ms / self.terms.overhead_target
        needed = needed_ms / slowest_ms
        if needed > self.anchor and not self.is_held:
            self.anchor = min(2.0 * self.anchor, 1.1 * needed, float(self.terms.max_anchor))
        elif needed < 0.5 * self.anchor:
            self.anchor *= 0.9
        self.anchor = max(self._floor, self.anchor)
        if self.anchor == before:
            return []
        return [Decision("anchor", {"anchor": self.anchor, "overhead": cost_ms / (before * slowest_ms)})]

    def _set_counts(self) -> list[Decision]:
        if not self.is_measured:
            return []
        best = self._best_counts()
        if best == self.counts:
            return []
        # About as long as before: only a predicted gain is worth a change.
        is_same_length = abs(sum(best) - sum(self.counts)) <= 0.05 * sum(self.counts)
        if is_same_length and self._efficiency(best) < (1.0 + COUNT_GAIN) * self._efficiency(self.counts):
            return []
        self.counts = best
        return [Decision("counts", {"counts": list(best), "anchor": self.anchor})]

    def _best_counts(self) -> tuple[int, ...]:
        if self.terms.shares is not None:
            least = min(share for share in self.terms.shares if share > 0)
            return tuple(int(self.anchor * share / least + 0.5) for share in self.terms.shares)
        slowest_ms = max(self._ms)
        exact = [self.anchor * slowest_ms / ms for ms in self._ms]
        # Few ranks lose least when counts are rounded, many when nobody does more than its part.
        ways = [tuple(max(1, int(count + up)) for count in exact) for up in (0.5, 0.25, 1e-9)]
        return max(ways, key=self._efficiency)

    def _efficiency(self, counts: Sequence[int]) -> float:
        """How fast such windows are predicted to go, where 1 is the sum of all speeds: the rest is waiting."""
        window_ms = max(count * ms for count, ms in zip(counts, self._ms, strict=True))
        return sum(counts) / (window_ms * sum(self.speeds))


def _remember(seen: list[float], value: float) -> float:
    """Adds the value to the last few and returns their median, the lower one of two."""
    seen.append(value)
    del seen[:-MEMORY]
    return sorted(seen)[(len(seen) - 1) // 2]
