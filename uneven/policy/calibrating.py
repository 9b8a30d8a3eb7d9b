"""Balanced shares for ranks that nobody could measure beforehand: the first slots are cut so that they tell.

In a loop of the user's own there is no step to rehearse. A rank's time has a fixed part and a part per sample, and
steps of one size cannot tell them apart: taken for all per sample, a fixed part drives the shares to one end. So the
first slots come in three sizes for every rank (even, then half of the ranks more than the others, then the reverse),
and the line through what they took is the rank's cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from uneven.policy.exact import Balanced, Move
from uneven.policy.finish import Cost, by_ratio, fitted

REPEATS = 3  # slots of each size
CUTS = ((1.0, 1.0), (1.0, 3.0), (3.0, 1.0))  # weights of the even and of the odd ranks


@dataclass
class Calibrating:
    """The first slots by CUTS, from then on `Balanced` with what they showed. Replicated like the other policies."""

    ranks: int
    slot_size: int
    first: int = 1  # the first slot that is measured: the one before it compiles and allocates
    least: int = 1
    lookahead: int = 0
    caps: tuple[int, ...] | None = None
    _seen: list[tuple[int, tuple[int, ...], tuple[float, ...]]] = field(default_factory=list)
    _balanced: Balanced | None = None

    def shares(self, slot: int, samples: int) -> tuple[int, ...]:
        if self._balanced is not None and slot >= self._taken_over:
            return self._balanced.shares(slot, samples)
        cut = max(0, slot - self.first) // REPEATS
        weights = CUTS[cut] if cut < len(CUTS) else CUTS[0]
        return by_ratio([weights[rank % 2] for rank in range(self.ranks)], samples, self.least, self.caps)

    def note(self, slot: int, samples: int, busy_ms: Sequence[float]) -> Move | None:
        if self._balanced is not None:
            return self._balanced.note(slot, samples, busy_ms) if slot >= self._taken_over else None
        if slot >= self.first:
            self._seen.append((slot, self.shares(slot, samples), tuple(busy_ms)))
        if slot < self.first + REPEATS * len(CUTS) - 1:
            return None
        costs = tuple(
            fitted([(shares[rank], ms[rank]) for _, shares, ms in self._seen if shares[rank] and ms[rank] > 0.0])
            for rank in range(self.ranks)
        )
        self._balanced = Balanced(costs, self.slot_size, self.caps, self.least, self.lookahead)
        return Move(self._taken_over, self._balanced.shares(self._taken_over, self.slot_size), 0.0)

    def fingerprint(self) -> int:
        return 0 if self._balanced is None else self._balanced.fingerprint()

    @property
    def costs(self) -> tuple[Cost, ...] | None:
        """What the first slots showed; None while they are still running."""
        return None if self._balanced is None else self._balanced.costs

    @property
    def _taken_over(self) -> int:
        # Parts already asked for by a feed that reads ahead were cut before anything was known.
        return self.first + REPEATS * len(CUTS) + self.lookahead
