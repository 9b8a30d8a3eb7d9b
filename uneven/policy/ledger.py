"""Which slots a run has trained, where a stop may leave some untrained before others that are trained.

In a local policy every rank has slots of its own, so a run that stops between events leaves gaps. A resumed run trains
them first, in order, and everything else (windows, events, rounds) goes on counting how many slots are trained: that
number is the *position*. Positions from `trained` up to `next` are the slots of the gaps in ascending order, and later
positions are the slots themselves. Pure; written into checkpoints.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Ledger:
    """Invariant: the gaps [first, stop) are ascending, apart, before `next`, and hold `next - trained` slots in all.

    Slots that the user's loop left out count as trained: nobody trains them later.
    """

    trained: int = 0  # how many
    next: int = 0  # the first slot after all trained ones
    gaps: tuple[tuple[int, int], ...] = ()
    _positions: tuple[int, ...] = field(init=False, repr=False, compare=False)  # of each gap's first slot

    def __post_init__(self) -> None:
        position, last = self.trained, -1
        positions = []
        for first, stop in self.gaps:
            if not last < first < stop < self.next:
                raise ValueError(f"{self} is none: gaps must be ascending, apart and before {self.next}")
            positions.append(position)
            position, last = position + stop - first, stop
        if self.trained < 0 or position != self.next:
            raise ValueError(f"{self} is none: with its gaps it has {position} slots before {self.next}")
        object.__setattr__(self, "_positions", tuple(positions))

    @classmethod
    def prefix(cls, slots: int) -> "Ledger":
        """All slots before this one are trained, and no other: as at every event."""
        return cls(slots, slots)

    @classmethod
    def from_logs(cls, logs: Iterable[Iterable[tuple[int, int, int]]], done: int = 0) -> "Ledger":
        """From all ranks' logs of (slot, first, samples), in which a part is a whole slot.

        All slots before `done` are trained or left out, as after the event there.
        """
        return cls.prefix(done).after(slot for log in logs for slot, _, _ in log if slot >= done)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Ledger":
        return cls(data["trained"], data["next"], tuple((first, stop) for first, stop in data["gaps"]))

    def to_json(self) -> dict[str, Any]:
        return {"trained": self.trained, "next": self.next, "gaps": [list(gap) for gap in self.gaps]}

    @property
    def first_untrained(self) -> int:
        return self.gaps[0][0] if self.gaps else self.next

    @property
    def trained_between(self) -> list[tuple[int, int]]:
        """The slots [first, stop) after the first gap that are trained."""
        ends = [*(first for first, _ in self.gaps[1:]), self.next]
        return [(stop, end) for (_, stop), end in zip(self.gaps, ends, strict=False)]

    def slot_at(self, position: int) -> int:
        """The slot that is trained at this position, which is not before `trained`."""
        if position >= self.next:
            return position
        gap = bisect_right(self._positions, position) - 1
        if gap < 0:
            raise ValueError(f"position {position} lies before {self.trained}, the first that is not trained")
        return self.gaps[gap][0] + position - self._positions[gap]

    def advanced_to(self, position: int) -> "Ledger":
        """With all positions before this one trained, too: as at an event of the resumed run."""
        if position >= self.next:
            return Ledger.prefix(position)
        slot = self.slot_at(position)
        left = tuple((max(first, slot), stop) for first, stop in self.gaps if stop > slot)
        return Ledger(position, self.next, left)

    def after(self, slots: Iterable[int]) -> "Ledger":
        """With these slots trained, too. ValueError where one of them was trained before or occurs twice."""
        new = sorted(slots)
        if not new:
            return self
        stop = max(self.next, new[-1] + 1)
        open_gaps = [*self.gaps, (self.next, stop)] if stop > self.next else list(self.gaps)
        gaps, place = _without(_joined(open_gaps), new)
        if place < len(new):
            raise ValueError(f"slot {new[place]} was trained twice")
        return Ledger(self.trained + len(new), stop, tuple(gaps))


def _joined(gaps: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours as one: the slots after `next` may follow a gap."""
    joined: list[tuple[int, int]] = []
    for first, stop in gaps:
        if joined and joined[-1][1] == first:
            first = joined.pop()[0]
        joined.append((first, stop))
    return joined


def _without(gaps: Sequence[tuple[int, int]], slots: Sequence[int]) -> tuple[list[tuple[int, int]], int]:
    """The gaps without these slots, which ascend; and the place of the first slot that is in no gap."""
    left: list[tuple[int, int]] = []
    place = 0
    for first, stop in gaps:
        while place < len(slots) and first <= slots[place] < stop:
            if first < slots[place]:
                left.append((first, slots[place]))
            first, place = slots[place] + 1, place + 1
        if first < stop:
            left.append((first, stop))
    return left, place
