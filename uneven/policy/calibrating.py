"""Balanced shares without a warm-up: the first slots of the run are used to measure every rank.

In the user's own loop there is no step to measure beforehand. A rank's step time has a fixed part and a part per
sample, and steps of one size cannot separate them: if all of it is taken as per sample, the fixed part drives the
shares to one extreme. So the first slots come in three sizes for every rank (even, then odd ranks more, then even
ranks more), and the line through the measured times is the rank's cost. train/gradient_sync.py uses it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from uneven.policy.exact import Balanced, Move
from uneven.policy.finish import Cost, by_ratio, fitted

REPEATS = 3  # slots of each size
CUTS = ((1.0, 1.0), (1.0, 3.0), (3.0, 1.0))  # weights of the even and of the odd ranks


@dataclass
class Calibrating:
    """An exact policy: the first slots are divided by CUTS, later ones by `Balanced` with the costs measured in them.

    Replicated like the other exact policies: equal on all ranks after the same slot.
    """

    ranks: int
    slot_size: int
    # The first slot that is measured: the one before it, where the run begins or was resumed, compiles and allocates.
    first: int = 1
    least: int = 1
    lookahead: int = 0
    caps: tuple[int, ...] | None = None
    keeps_all: bool = False  # see Balanced
    _measured: list[tuple[int, tuple[int, ...], tuple[float, ...]]] = field(default_factory=list)
    _balanced: Balanced | None = None

    def shares(self, slot: int, samples: int) -> tuple[int, ...]:
        if self._balanced is not None and slot >= self._first_balanced:
            return self._balanced.shares(slot, samples)
        cut = max(0, slot - self.first) // REPEATS
        weights = CUTS[cut] if cut < len(CUTS) else CUTS[0]
        return by_ratio([weights[rank % 2] for rank in range(self.ranks)], samples, self.least, self.caps)

    def note(self, slot: int, samples: int, busy_ms: Sequence[float]) -> Move | None:
        if self._balanced is not None:
            return self._balanced.note(slot, samples, busy_ms) if slot >= self._first_balanced else None
        if slot >= self.first:
            self._measured.append((slot, self.shares(slot, samples), tuple(busy_ms)))
        if slot < self.first + REPEATS * len(CUTS) - 1:
            return None
        costs = tuple(
            fitted([(shares[rank], ms[rank]) for _, shares, ms in self._measured if shares[rank] and ms[rank] > 0.0])
            for rank in range(self.ranks)
        )
        self._balanced = self._balance(costs)
        return Move(self._first_balanced, self._balanced.shares(self._first_balanced, self.slot_size), 0.0)

    def fingerprint(self) -> int:
        return 0 if self._balanced is None else self._balanced.fingerprint()

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first, "balanced": None if self._balanced is None else self._balanced.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The costs that the run had measured; where it had not finished that, this one measures anew.

        Half a measurement is not kept: the first steps of a new process take longer and would tilt the line.
        """
        if state["balanced"] is None:
            return
        balanced = self._balance((Cost(0.0, 1.0),) * self.ranks)
        balanced.load_state_dict(state["balanced"])
        self.first, self._balanced = state["first"], balanced

    @property
    def costs(self) -> tuple[Cost, ...] | None:
        """The costs measured in the first slots; None until these are done."""
        return None if self._balanced is None else self._balanced.costs

    def _balance(self, costs: tuple[Cost, ...]) -> Balanced:
        return Balanced(costs, self.slot_size, self.caps, self.least, self.lookahead, keeps_all=self.keeps_all)

    @property
    def _first_balanced(self) -> int:
        # Slots that a feed has read ahead were divided before the costs were known.
        return self.first + REPEATS * len(CUTS) + self.lookahead
