"""What a full slot takes on each rank, by its last windows, and which ranks are left out because they became too slow.

The estimates behind policy/windows.py. All ranks are one array, so that a thousand of them cost little;
policy/typical.py says what arrays may be used for here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from uneven.policy.left_out import next_probes
from uneven.policy.typical import Flags, Floats, Ints, LastThree


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
        """Ranks that became too slow to help get no slots, but for a probe now and then; see policy/left_out.py."""
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
