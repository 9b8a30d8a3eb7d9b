"""The typical value of what was last measured on each rank: a median of three, which one outlier does not change.

Used by policy/slot_times.py, whose ranks are one array: a round of a thousand of them costs an eighth of what it did.
Every rank has a copy of the controller, and the copies must be the same to the last bit on every CPU: arrays are used
element by element and for the largest and smallest, sums are `math.fsum`, which is exact. A sum by the library
would add in an order that depends on the CPU (tests/policy/test_many_ranks.py).
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

NOTHING = np.array([np.inf, np.inf, -np.inf])  # one value later it is (inf, -inf, a), and then (-inf, a, b)


class LastThree:
    """The last three values of each rank, oldest first.

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
