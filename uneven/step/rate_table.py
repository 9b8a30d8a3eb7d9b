"""What a torch scheduler has set at every position it has passed: learning rates, and momentum or betas where it does.

Schedulers go forwards only, and many of them compute a rate from the one before. The table gives a position that is
asked for again its own values, whatever the scheduler has done since. Used by step/schedule.py.
"""

from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

RATE = "lr"
OTHERS = ("momentum", "betas")  # what OneCycleLR and CyclicLR change besides the rates


def has_numbers(optimizer: Optimizer, name: str) -> bool:
    """Whether the setting is one, or several, in every param group that has it: some optimizers take betas of None."""
    found = [number for group in optimizer.param_groups for number in _numbers(group, name)]
    return bool(found) and all(isinstance(number, int | float | Tensor) for number in found)


def read_setting(optimizer: Optimizer, name: str) -> list[float]:
    """The numbers of a setting of all param groups in order; a group may have none or, as betas, several."""
    return [float(number) for group in optimizer.param_groups for number in _numbers(group, name)]


def write_setting(optimizer: Optimizer, name: str, values: Sequence[float]) -> None:
    """The reverse of `read_setting`. A tensor is filled in place (a captured step reads it); equal values stay."""
    left = iter(values)
    for group in optimizer.param_groups:
        old = _numbers(group, name)
        new = [next(left) for _ in old]
        for number, value in zip(old, new, strict=True):
            if isinstance(number, Tensor):
                number.fill_(value)
        if any(not isinstance(one, Tensor) and float(one) != value for one, value in zip(old, new, strict=True)):
            whole = [one if isinstance(one, Tensor) else value for one, value in zip(old, new, strict=True)]
            group[name] = type(group[name])(whole) if isinstance(group[name], tuple | list) else whole[0]


def _numbers(group: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = group.get(name)
    if isinstance(value, tuple | list):
        return value
    return [] if value is None else [value]


class RateTable:
    """Invariant: a setting's rows hold from their `start` up to the next one's; equal neighbours are one row.

    So a setting that never changes costs one row, and one that changes at every position 8 bytes a number.
    """

    def __init__(self, position: int, values: Sequence[float]) -> None:
        self._width = len(values)
        self._starts = array("q", [position])
        self._values = array("d", values)

    def at(self, position: int) -> list[float]:
        row = bisect_right(self._starts, position) - 1
        assert row >= 0, f"position {position} of the schedule lies before {self._starts[0]}, the first that was kept"
        return self._row(row)

    def add(self, position: int, values: Sequence[float]) -> None:
        """The values from this position on; it lies after all others."""
        if list(values) != self._row(len(self._starts) - 1):
            self._starts.append(position)
            self._values.extend(values)

    def replace_from(self, position: int, changes: Mapping[int, float]) -> None:
        """Set single numbers, by their place in the row, at this position and all later ones."""
        row = bisect_right(self._starts, position) - 1
        if self._starts[row] != position:
            self._starts.insert(row + 1, position)
            self._values[(row + 1) * self._width : (row + 1) * self._width] = array("d", self._row(row))
            row += 1
        for later in range(row, len(self._starts)):
            for place, value in changes.items():
                self._values[later * self._width + place] = value

    def to_json(self, first: int) -> list[list[float]]:
        """Rows of [start, *values]: what holds at position `first` and later."""
        row = max(0, bisect_right(self._starts, first) - 1)
        return [[max(first, self._starts[place]), *self._row(place)] for place in range(row, len(self._starts))]

    @classmethod
    def from_json(cls, rows: Sequence[Sequence[float]]) -> "RateTable":
        table = cls(int(rows[0][0]), rows[0][1:])
        for start, *values in rows[1:]:
            table.add(int(start), values)
        return table

    def _row(self, place: int) -> list[float]:
        return self._values[place * self._width : (place + 1) * self._width].tolist()
