"""Windows and rounds: how long ranks train by themselves before their params are averaged, and who takes how much.

The controller of the local policies. It is replicated: every rank passes the same reports to its own copy, in round
order, and gets the same windows; it reads nothing else and uses only + - * / and comparisons, of all ranks at once
where it can (policy/slot_times.py says what that may be used for). The slowest rank trains
`anchor` slots a window and the others as many as their speed allows, so that all finish at the same moment. The anchor
grows until rounds cost little, and the guard holds it back when replicas drift apart. train/local_sgd.py drives it.
"""

import copy
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Literal

import numpy as np

from uneven.policy.finish import by_ratio
from uneven.policy.late import split_beside, taken_back
from uneven.policy.round_report import RoundReport
from uneven.policy.slot_times import Floats, Ints, SlotTimes, best_counts, slots_per_ms, with_probes

LATENCY_SHARE = 0.1  # async: what a round may take from snapshot to average, as a share of its window
COUNT_GAIN = 0.02  # counts change when slots are predicted to go so much faster
MEMORY = 3  # rounds in the median of a cost, so a single outlier changes nothing
UNTYPICAL = 2  # rounds at the start whose costs are not representative: the first step compiles and allocates
ESTIMATES = ("_floor", "_costs_ms", "_blocked_ms", "_latencies_ms", "_divergences")
# What a resumed run goes on with, under the names that checkpoints have always had; the other fields are its settings.
STATE = {
    **{name: name for name in ("slot_ms", "start", "rounds", "anchor", "counts", "is_over", "is_held", "event", "due")},
    **{name: name for name in ESTIMATES},
    "last_event": "passed",
    "_divided_to": "_held",
    "back": "back",
    "unfinished": "kept",
}


@dataclass(frozen=True, slots=True)
class Decision:
    """A change made by the controller."""

    kind: Literal["counts", "anchor", "guard"]
    fields: dict[str, float | list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSGDConfig:
    """The user's settings of the local policies."""

    is_async: bool = False
    anchor: int = 10
    max_anchor: int = 200
    overhead_target: float = 0.03
    divergence_threshold: float = 0.05
    shares: tuple[float, ...] | None = None  # fixed ratio of the counts; nothing adapts then

    @classmethod
    def anchors(cls, anchor: int | None, max_anchor: int | None) -> tuple[int, int]:
        """The first and the largest anchor. Where only one of them is given, the other's default follows it."""
        default = cls()
        first = min(default.anchor, max_anchor or default.anchor) if anchor is None else anchor
        return first, max(default.max_anchor, first) if max_anchor is None else max_anchor


@dataclass
class Windows:
    """The current window and the estimates behind it. Call `note` after every round, until `is_over`.

    Invariant: `start` and `due` are the same on all ranks after the same round.

    `slot_ms` is every rank's time for a full slot, or None where nothing could be measured beforehand: then the first
    two windows give every rank one slot, and the second of them is measured. `next_event(slot)` is the first slot
    after `slot` where all ranks must synchronize for another reason (epoch end, evaluation, checkpoint); the end of
    the run is the last event, and its own successor.
    """

    config: LocalSGDConfig
    ranks: int
    slot_size: int
    next_event: Callable[[int], int]
    slot_ms: list[float] | None = None
    may_end: bool = False  # a stream without length: an epoch may end before the next event that is known
    start: int = 0
    rounds: int = 0  # done, without round 0
    anchor: float = 0.0
    counts: tuple[int, ...] = ()
    is_over: bool = False  # the last round, at the end of the run, is done
    is_held: bool = False  # by the guard: the anchor may not grow
    event: int = 0  # the next slot at which all ranks synchronize whatever the window
    due: int = 0  # the slot of the next round
    back: list[int] = field(default_factory=list)  # handed back by ranks that were late: they come first
    unfinished: list[list[int]] = field(default_factory=list)  # of earlier windows, by rank: it was late with them
    last_event: int = 0  # that all ranks have passed
    # A stream's end cut a window short whose slots up to this one had been divided: they come before all others.
    _divided_to: int = 0
    _floor: float = 0.0  # of the anchor: the first one, unless the guard went below it
    times: SlotTimes = field(default_factory=lambda: SlotTimes(None, 0), repr=False)
    _costs_ms: list[float] = field(default_factory=list)  # of the last rounds, in the ranks' own time
    _blocked_ms: list[float] = field(default_factory=list)
    _latencies_ms: list[float] = field(default_factory=list)
    _divergences: list[float] = field(default_factory=list)  # rising ones, above the threshold

    def __post_init__(self) -> None:
        self.times = SlotTimes(self.slot_ms, self.ranks)
        self.unfinished = [[] for _ in range(self.ranks)]
        self.anchor = self._floor = float(self.config.anchor)
        self.counts = tuple(self._best_counts().tolist()) if self.is_measured else (1,) * self.ranks
        self.event = self.next_event(0)
        self._set_due()

    @property
    def is_measured(self) -> bool:
        """Whether the counts rest on measured speeds or on fixed shares, and not on a guess."""
        return self.slot_ms is not None or self.rounds >= UNTYPICAL or self.config.shares is not None

    @property
    def is_blocking(self) -> bool:
        """Whether the round that is due waits for its average."""
        return not self.config.is_async or self.due == self.event or not self.is_measured

    @property
    def speeds(self) -> list[float]:
        """Full slots per ms; 0 for a rank that is left out."""
        speeds: list[float] = self._speeds.tolist()
        return speeds

    @property
    def _speeds(self) -> Floats:
        if self.config.shares is not None:
            return np.array(self.config.shares, dtype=np.float64)
        return self.times.speeds

    def slot_time_ms(self, rank: int) -> float:
        """What the rank takes for a full slot."""
        return float(self.times.ms[rank]) if self.config.shares is None else 1.0 / self.config.shares[rank]

    def is_left_out(self, rank: int) -> bool:
        """Whether the rank became too slow to help: it gets no slots, but for a probe now and then."""
        return bool(self.times.probe_in[rank] >= 0)

    def is_probed(self, rank: int) -> bool:
        """Whether a rank that is left out is tried in this window."""
        return bool(self.times.probe_in[rank] == 0)

    @property
    def hands_back(self) -> bool:
        """Whether a rank that is late may hand slots back. Where a stream may end in the window nobody knows them."""
        is_adaptive = not self.config.is_async and self.config.shares is None and self.is_measured
        return is_adaptive and not self.may_end and self.ranks > 1

    @property
    def planned_ms(self) -> float:
        """How long the window takes by the present estimates, probes apart."""
        owned = np.array(self.cut()) + np.array([len(slots) for slots in self.unfinished])
        return float(np.where(self.times.probe_in >= 0, 0.0, owned * self.times.ms).max())

    def cut(self) -> tuple[int, ...]:
        """How many new slots of the window each rank gets, in rank order: those handed back and [start, due)."""
        length = max(0, self.due - self.start) + len(self.back)  # all may be given already, before a stream's end
        if length == sum(self.counts) and not any(self.unfinished) and not (self.times.probe_in == 0).any():
            return self.counts
        ratio = self.speeds if self.is_measured else [1.0] * self.ranks
        if not any(self.unfinished):
            return with_probes(by_ratio(ratio, length), self.times.probe_in)
        return with_probes(split_beside([len(slots) for slots in self.unfinished], ratio, length), self.times.probe_in)

    def slots_of(self, rank: int) -> Sequence[int]:
        """The rank's new slots of the window, in order."""
        counts = self.cut()
        first = sum(counts[:rank])
        if not self.back:
            return range(self.start + first, self.start + first + counts[rank])
        return [*self.back, *range(self.start, self.due)][first : first + counts[rank]]

    def note(self, reports: Sequence[RoundReport]) -> list[Decision]:
        """A round is done: the reports of all ranks, in rank order. Sets the next window; returns what changed."""
        was_divided = not (self.config.is_async and self.is_measured)
        # By field: a thousand reports are looked through once.
        reported = dict(zip(RoundReport._fields, zip(*reports, strict=True), strict=True))
        if was_divided and (self.back or any(reported["returned"]) or any(reported["kept"])):
            owned = [[*slots, *self.slots_of(rank)] for rank, slots in enumerate(self.unfinished)]
            self.back, self.unfinished = taken_back(owned, reports)
        self.rounds += 1
        decisions: list[Decision] = []
        if self.config.shares is None:
            decisions += self._adapt(reported)
        next_slots = reported["next_slot"]
        self._learn_event(was_divided)
        # A round that stops the run may come before the event.
        if self.due == self.event and int(min(next_slots)) >= self.event:
            self.last_event = self.event
            self.event = self.next_event(self.last_event)
            self.is_over = self.event == self.last_event
        self.start = max(self.due, self._divided_to, int(max(next_slots)))
        self._set_due()
        return decisions

    def _adapt(self, reported: Mapping[str, tuple[float, ...]]) -> list[Decision]:
        """Speeds, anchor and counts follow the reports, of which these are the fields."""
        samples = np.array(reported["samples"])
        if self.slot_ms is not None or self.rounds >= UNTYPICAL:  # the very first step compiles and allocates
            busy_ms = np.array(reported["busy_ms"])
            slower = self.times.update(self.slot_size, samples, busy_ms, reported["recent_ms"])
            if slower > 2.0:  # windows were as long as they had to be, and stay so where they may
                self.anchor = max(self._floor, self.anchor / slower)
        if self.is_measured:
            self.times.leave_out(self.anchor, samples)
        return [
            *self._guard(max(reported["divergence"])),
            *self._set_anchor(reported["transfer_ms"], reported["latency_ms"]),
            *self._set_counts(),
        ]

    def learn_event(self, slot: int) -> None:
        """A slot that was asked for in the reports of a round becomes an event; on all ranks, before `note`.

        No rank was handed a slot beyond it: policy/slot_schedule.py::first_free_slot. `next_event` knows it already.
        """
        assert slot >= self.due, f"slot {slot} cannot become an event: ranks may have passed the round at {self.due}"
        self.event = min(self.event, slot)

    def follow_events(self, next_event: Callable[[int], int]) -> None:
        """Before the first slot: events are at these slots instead."""
        self.next_event = next_event
        self.event = next_event(0)

    def end_at(self, event: int) -> None:
        """The round to be noted is at this event: all ranks leave out the slots before it that nobody has trained."""
        self.due = self.event = event
        self._drop_back()

    def _drop_back(self) -> None:
        """Nobody trains the slots that were handed back or are unfinished."""
        self.back = []
        self.unfinished = [[] for _ in range(self.ranks)]

    def _learn_event(self, was_divided: bool) -> None:
        """Where nobody knew the next event, a stream's end: it may lie inside the window, and the round was at it."""
        due = self.due
        if self.may_end:
            self.event = self.next_event(self.last_event)
            self.due = min(due, self.event)
        if was_divided and self.due < due:
            self._divided_to = max(self._divided_to, due)
        elif due >= self._divided_to:
            self._divided_to = 0

    def fingerprint(self) -> int:
        """24 bits of the state: equal on all ranks."""
        unfinished = self.unfinished if any(self.unfinished) else None
        rest = (
            *(self.anchor, self._floor, self.start, self.due, self.event, self.rounds, self.is_held, self._divided_to),
            *(self._divergences, self._costs_ms, self._blocked_ms, self._latencies_ms, self.back, unfinished),
        )
        numbers = self.times.tobytes() + np.array(self.counts).tobytes()
        return zlib.crc32(numbers + repr(rest).encode()) & 0xFFFFFF

    def state_dict(self) -> dict[str, Any]:
        """The state as plain JSON: with it, a fresh copy for as many ranks goes on with equal fingerprints."""
        own = {key: copy.deepcopy(getattr(self, name)) for name, key in STATE.items()}
        return {"ranks": self.ranks, **own, **self.times.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The state of a run with as many ranks; next comes `resume_at`, unless it stopped after a round."""
        if state["ranks"] != self.ranks:
            raise ValueError(f"the state of {state['ranks']} ranks does not fit {self.ranks}")
        for name, key in STATE.items():
            if key in state:
                setattr(self, name, copy.deepcopy(state[key]))
        self.times.load_state_dict(state, range(self.ranks))
        self.counts = tuple(self.counts)

    def go_on(self, state: Mapping[str, Any], places: Sequence[int | None]) -> None:
        """Take over the estimates of a run with other ranks; next comes `resume_at`.

        `places`: where each rank of this one was in that one; None for a newcomer, whose measured time counts.
        """
        for name in ("rounds", "anchor", "is_held", *ESTIMATES):
            setattr(self, name, copy.deepcopy(state[name]))
        self.times.load_state_dict(state, places)
        self.slot_ms = None if state["slot_ms"] is None else self.times.ms.tolist()
        self.counts = tuple(self._best_counts().tolist()) if self.is_measured else (1,) * self.ranks

    def resume_at(self, slot: int, last_event: int | None = None) -> None:
        """Before any slot was given out: go on here as after a round at an event. Estimates stay what they are.

        `last_event`: the last one that all ranks have passed, where it is not this slot. Then the next one may be at
        this very slot, and a round is due at once.
        """
        self.start = slot
        self.last_event = slot if last_event is None else last_event
        self.event = self.next_event(self.last_event)
        self.is_over = self.event == self.last_event
        self._divided_to = 0
        self._drop_back()
        self._set_due()

    def _set_due(self) -> None:
        """The end of the window that begins at `start`."""
        left, length = self.event - self.start + len(self.back), sum(self.counts)
        if self._divided_to:
            self.due = min(self.event, self._divided_to)
        elif left <= length:
            self.due = self.event
        elif left < 2 * length:
            # Two equal windows: a short last one would cost a round of its own.
            self.due = max(min(self.event, self.start + 1), self.event - left // 2)
        else:
            self.due = min(self.event, self.start + max(1, length - len(self.back)))

    def _guard(self, found: float) -> list[Decision]:
        """Three rises of the divergence above the threshold hold the anchor until it is below; more shrink it."""
        if not found > self.config.divergence_threshold:
            self.is_held, self._divergences = False, []
            self._floor = min(float(self.config.anchor), self._floor + 1.0)
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

    def _set_anchor(self, transfer_ms: Sequence[float], latency_ms: Sequence[float]) -> list[Decision]:
        """Move the anchor towards the one at which a round costs `overhead_target` of its window.

        The cost of a round in ms does not depend on its window, so the anchor needed is computed from it, not found by
        trial. A blocking round costs its latency on the rank that arrives last. The other ranks' waiting is left out:
        the part due to whole counts is predicted, and the rest comes from wrong counts or noise, which longer windows
        hardly reduce.
        """
        if self.rounds <= UNTYPICAL + 1:
            return []
        slowest_ms, before = self.times.slowest_ms, self.anchor
        if not (takes_part := self.times.takes_part).all():  # others only wait
            transfer_ms, latency_ms = (list(compress(ms, takes_part.tolist())) for ms in (transfer_ms, latency_ms))
        cost_ms = _median_with(self._costs_ms, math.fsum(transfer_ms) / len(transfer_ms))
        typical_ms = _median_with(self._latencies_ms, math.fsum(latency_ms) / len(latency_ms))
        if self.config.is_async:
            needed_ms = max(cost_ms / self.config.overhead_target, typical_ms / LATENCY_SHARE)
        else:
            cost_ms += _median_with(self._blocked_ms, min(latency_ms))
            speed = math.fsum(self._speeds.tolist())
            joint = slots_per_ms(self._best_counts(), self.times.ms)
            cost_ms += (1.0 - joint / speed) * self.anchor * slowest_ms
            needed_ms = cost_ms / self.config.overhead_target
        needed = needed_ms / slowest_ms
        if needed > self.anchor and not self.is_held:
            self.anchor = min(2.0 * self.anchor, 1.1 * needed, float(self.config.max_anchor))
        elif needed < 0.5 * self.anchor:
            self.anchor *= 0.9
        self.anchor = max(self._floor, self.anchor)
        if self.anchor == before:
            return []
        return [Decision("anchor", {"anchor": self.anchor, "overhead": cost_ms / (before * slowest_ms)})]

    def _set_counts(self) -> list[Decision]:
        if not self.is_measured:
            return []
        best, counts = self._best_counts(), np.array(self.counts)
        slot_ms = self.times.ms
        if np.array_equal(best, counts):
            return []
        # A window of about the same length changes only for a predicted gain.
        new, old = best.tolist(), sum(self.counts)
        is_same_length = abs(sum(new) - old) <= 0.05 * old
        if is_same_length and slots_per_ms(best, slot_ms) < (1.0 + COUNT_GAIN) * slots_per_ms(counts, slot_ms):
            return []
        self.counts = tuple(new)
        return [Decision("counts", {"counts": new, "anchor": self.anchor})]

    def _best_counts(self) -> Ints:
        if self.config.shares is not None:
            least = min(share for share in self.config.shares if share > 0)
            return np.array([int(self.anchor * share / least + 0.5) for share in self.config.shares])
        return best_counts(self.anchor * self.times.slowest_ms, self._speeds, self.times.ms)


def _median_with(seen: list[float], value: float) -> float:
    """Append the value to the last MEMORY ones and return their median (of an even number the lower)."""
    seen.append(value)
    del seen[:-MEMORY]
    return sorted(seen)[(len(seen) - 1) // 2]
