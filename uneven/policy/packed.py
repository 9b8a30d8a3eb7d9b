"""Lists of rows of numbers that grow with every step of a run, without an object for each of them.

A run of a week has millions of steps: as tuples its log took 137 bytes a step, as numbers it takes 25.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

from uneven.policy.recorded import Round

Row = TypeVar("Row", bound=tuple[Any, ...])


class PackedRows(Sequence[Row], Generic[Row]):
    """Rows of `width` numbers of one kind, as `make` makes them; equal to any sequence of the same rows."""

    def __init__(self, width: int, code: str, make: Callable[..., Row], rows: Iterable[Row] = ()) -> None:
        self._width, self._make = width, make
        self._numbers: array[Any] = array(code)
        for row in rows:
            self.append(row)

    def append(self, row: Row) -> None:
        self._numbers.extend(row)

    def __len__(self) -> int:
        return len(self._numbers) // self._width

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self._row(place) for place in range(*index.indices(len(self)))]
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(index)
        return self._row(place)

    def __iter__(self) -> Iterator[Row]:
        return (self._row(place) for place in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __repr__(self) -> str:
        return repr(list(self))

    def _row(self, place: int) -> Row:
        return self._make(*self._numbers[self._width * place : self._width * (place + 1)])


def pack_log(parts: Iterable[tuple[int, int, int]] = ()) -> PackedRows[tuple[int, int, int]]:
    """The log of a rank: (slot, first, samples) of each part that it trained."""
    return PackedRows(3, "q", lambda *numbers: numbers, parts)


def pack_rounds(rounds: Iterable[Round] = ()) -> PackedRows[Round]:
    """The rounds of a rank; a double holds a slot exactly."""
    return PackedRows(4, "d", _round, rounds)


def _round(due: float, entered: float, merged: float, scale: float) -> Round:
    return Round(int(due), int(entered), int(merged), scale)
