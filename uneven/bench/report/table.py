"""Tables of a report as text, and the numbers in them; sections.py and details.py fill them."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Cells as text; `of` leaves out columns that are empty in every row."""

    head: list[str]
    rows: list[list[str]]

    @classmethod
    def of(cls, head: Sequence[str], rows: Sequence[Sequence[str]]) -> "Table":
        assert all(len(row) == len(head) for row in rows), "a cell for every column"
        kept = [place for place in range(len(head)) if place == 0 or any(row[place] for row in rows)]
        return cls([head[place] for place in kept], [[row[place] for place in kept] for row in rows])


def value(metric: str, quality: float | None) -> str:
    """A quality: an accuracy in percent."""
    if quality is None:
        return ""
    return f"{100 * quality:.2f} %" if metric == "accuracy" else f"{quality:.{6 if metric == 'mse' else 4}f}"


def signed(metric: str, difference: float) -> str:
    """A difference of two qualities."""
    return f"{100 * difference:+.2f} pp" if metric == "accuracy" else f"{difference:+.{6 if metric == 'mse' else 3}f}"


def number(found: float | None, form: str, unit: str = "") -> str:
    return "" if found is None else format(found, form) + unit
