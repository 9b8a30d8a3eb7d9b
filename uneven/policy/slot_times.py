"""What a full slot takes on each rank, by its last windows, which ranks are left out as too slow, and the counts of a
window that follow: as many slots for each rank that all finish together.

The estimates behind policy/windows.py. All ranks are one array: a round of a thousand of them costs an eighth of what
it did. Every rank has a copy of the controller, and the copies must be the same to the last bit on every CPU: arrays
are used element by element and for the largest and smallest, sums are `math.fsum`, which is exact. A sum by the library
would add in an order that depends on the CPU (tests/policy/test_many_ranks.py).

A rank that trains a hundredth of the slots makes windows a hundred slots long and adds nothing. One that was slow from
the start was wanted so; one that *became* far slower is left out: it trains nothing and only follows the averages.
Now and then it gets a single slot, as rarely as the time for it allows, and comes back when that was fast.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

NOTHING = np.array([np.inf, np.inf, -np.inf])  # one value later it is (inf, -inf, a), and then (-inf, a, b)
ROUNDING = np.array([[0.5], [0.25], [1e-9]])  # of a count: to nearest, in between, all down
SLOWED = 4.0  # times slower than it was: below that it is an ordinary change
USE = 0.02  # of all ranks' speed: what it must add
PROBE_COST = 0.05  # of the time between two probes: what one may take
PROBE_ROUNDS = (8, 512)  # between two probes: at least and at most


class LastThree:
    """The last three values of each rank, oldest first, and their median, which one outlier does not change.

    Missing ones are infinite, so that the median of all three is that of what is there (of two the lower).
    """

    def __init__(self, lists: Sequence[Sequence[float]]) -> None:
        self._values: Floats = np.tile(NOTHING, (len(lists), 1))
        for rank, values in enumerate(lists):
            for value in values:
                self.add([rank], np.array([value]))

    def to_lists(self) -> list[list[float]]:
        return [[value for value in row if math.isfinite(value)] for row in self._values.tolist()]

    def tobytes(self) -> bytes:
        return self._values.tobytes()

    @property
    def is_known(self) -> Flags:
        """Of which ranks there is a value."""
        return np.isfinite(self._values[:, 2])

    def is_full(self, ranks: Any) -> Flags:
        """Of which of these there are three. `ranks` is an index of any kind, here and below."""
        full: Flags = np.isfinite(self._values[ranks, 0])
        return full

    def forget(self, ranks: Any) -> None:
        self._values[ranks] = NOTHING

    def add(self, ranks: Any, values: Floats) -> Floats:
        """One more value of these ranks; the median of what is known of each."""
        known = self._values[ranks]
        known[:, :2] = known[:, 1:]
        known[:, 2] = values
        self._values[ranks] = known
        first, second = known[:, 0], known[:, 1]
        low, high = np.minimum(first, second), np.maximum(first, second)
        typical: Floats = np.maximum(low, np.minimum(high, values))
        return typical


class SlotTimes:
    """Invariant: equal on all ranks after the same reports. `measured` are times taken beforehand, if there are any."""

    def __init__(self, measured: Sequence[float] | None, ranks: int) -> None:
        self.ms: Floats = np.array(measured or [1.0] * ranks, dtype=np.float64)
        self.seen_ms = LastThree([[ms] for ms in measured] if measured else [[]] * ranks)
        self.usual_ms: Floats = np.array(measured or [0.0] * ranks, dtype=np.float64)  # the shortest; 0: not known
        self.probe_in: Ints = np.full(ranks, -1)  # rounds until a rank that is left out is tried; -1: it takes part

    @property
    def takes_part(self) -> Flags:
        return self.probe_in < 0

    @property
    def speeds(self) -> Floats:
        """Full slots per ms; 0 for a rank that is left out."""
        return np.where(self.probe_in >= 0, 0.0, 1.0 / self.ms)

    @property
    def slowest_ms(self) -> float:
        """Of the ranks that take part."""
        takes_part = self.takes_part
        return float((self.ms[takes_part] if takes_part.any() else self.ms).max())

    def update(self, slot_size: int, samples: Floats, busy_ms: Floats, recent_ms: Sequence[float]) -> float:
        """The reports of a round; returns by which factor the slowest rank became slower."""
        slowest_ms = float(self.ms.max())
        is_measured = (samples >= slot_size) & (busy_ms > 0.0)  # less than a slot is too noisy
        for rank in [rank for rank, ms in enumerate(recent_ms) if ms > 0.0] if any(recent_ms) else ():
            self.seen_ms.forget([rank])
            self.ms[[rank]] = self.seen_ms.add([rank], np.array([recent_ms[rank]]))
            is_measured[rank] = False
        # A probe stands for itself: what was seen of the rank before is old.
        if self.probe_in.max() >= 0:
            self.seen_ms.forget(is_measured & (self.probe_in >= 0))
        if is_measured.all():
            self._update_ranks(slice(None), busy_ms * slot_size / samples)
        elif is_measured.any():
            ranks = np.flatnonzero(is_measured)
            self._update_ranks(ranks, busy_ms[ranks] * slot_size / samples[ranks])
        is_known = self.seen_ms.is_known
        if not is_known.all() and is_known.any():
            self.ms[~is_known] = self.ms[is_known].max()  # not measured yet: assume the slowest known speed
        return float(self.ms.max()) / slowest_ms

    def _update_ranks(self, ranks: Any, measured_ms: Floats) -> None:
        """Correct a large error at once, a small one slowly: it is mostly noise."""
        before_ms = self.ms[ranks]
        error = self.seen_ms.add(ranks, measured_ms) / before_ms - 1.0
        pull = np.minimum(1.0, np.maximum(0.2, 4.0 * np.abs(error)))
        pull[~self.seen_ms.is_full(ranks)] = 1.0
        self.ms[ranks] = before_ms * (1.0 + pull * error)

    def leave_out(self, anchor: float, samples: Floats) -> None:
        """Ranks that became too slow to help get no slots, but for a probe now and then."""
        self.usual_ms = np.minimum(np.where(self.usual_ms > 0.0, self.usual_ms, self.ms), self.ms)
        self.probe_in = next_probes(self.probe_in, self.ms, self.usual_ms, anchor * self.slowest_ms, samples > 0.0)

    def tobytes(self) -> bytes:
        arrays = (self.ms, self.usual_ms, self.probe_in)
        return b"".join([*(array.tobytes() for array in arrays), self.seen_ms.tobytes()])

    def state_dict(self) -> dict[str, Any]:
        """As plain JSON, under the names that checkpoints have always had."""
        lists = {"_ms": self.ms, "_usual_ms": self.usual_ms, "_probe_in": self.probe_in}
        return {name: array.tolist() for name, array in lists.items()} | {"_seen_ms": self.seen_ms.to_lists()}

    def load_state_dict(self, state: Mapping[str, Any], places: Sequence[int | None]) -> None:
        """`places`: where each rank of this run was in that one; None for a newcomer, whose measured time counts."""
        beside: list[tuple[float, int | None]] = list(zip(self.ms.tolist(), places, strict=True))
        self.ms = np.array([ms if place is None else state["_ms"][place] for ms, place in beside])
        self.usual_ms = np.array([ms if place is None else state["_usual_ms"][place] for ms, place in beside])
        self.probe_in = np.array([-1 if place is None else state["_probe_in"][place] for place in places])
        self.seen_ms = LastThree([[] if place is None else state["_seen_ms"][place] for place in places])


def next_probes(probe_in: Ints, slot_ms: Floats, usual_ms: Floats, window_ms: float, was_tried: Flags) -> Ints:
    """Rounds until each rank is tried again, 0 for in the next window; -1 where it takes part. After every round.

    `slot_ms` and `usual_ms`: every rank's present time per slot, and the shortest so far. `probe_in`: the last answer.
    """
    margin = np.where(probe_in >= 0, 1.5, 1.0)  # a rank that is out must be clearly better to come back
    has_slowed = slot_ms * margin > SLOWED * usual_ms
    if not has_slowed.any():
        return np.full(len(probe_in), -1)
    use = USE * math.fsum((1.0 / slot_ms).tolist())
    is_out = has_slowed & (1.0 / slot_ms < margin * use)
    least, most = PROBE_ROUNDS
    fresh = np.ceil(slot_ms / (PROBE_COST * max(window_ms, 1e-9)))
    begins = (probe_in < 0) | ((probe_in == 0) & was_tried)
    waits = np.where(begins, np.minimum(np.maximum(fresh, least), most), np.maximum(probe_in - 1, 0))
    return np.where(is_out, waits, -1).astype(np.int64)


def with_probes(counts: Sequence[int], probe_in: Ints) -> tuple[int, ...]:
    """One slot for each rank that is tried now, of whoever has the most."""
    cut = list(counts)
    for rank in np.flatnonzero(probe_in == 0).tolist():
        if max(cut) > 1:
            cut[cut.index(max(cut))] -= 1
            cut[rank] += 1
    return tuple(cut)


def best_counts(window_ms: float, speeds: Floats, slot_ms: Floats) -> Ints:
    """Whole counts for a window of about this length: at least 1, but 0 for a rank of speed 0, which is left out.

    Few ranks lose least when counts are rounded to nearest, many when all are rounded down.
    """
    exact = window_ms * speeds
    counts = np.maximum((exact + ROUNDING).astype(np.int64), 1) * (exact > 0.0)
    slots, window = counts.sum(axis=1), (counts * slot_ms).max(axis=1)  # whole numbers have one sum, in any order
    best: Ints = counts[(slots / window).argmax()]  # the first of those that wait least
    return best


def slots_per_ms(counts: Ints, slot_ms: Floats) -> float:
    """Predicted speed of such windows; what is missing to the sum of all speeds is waiting."""
    return int(counts.sum()) / float((counts * slot_ms).max())
