"""An interval of the axis as a user writes it: 2 (epochs), "2 epochs", "500 steps". Pure: imports no torch."""

import re
from typing import Any, Literal, NamedTuple

from uneven.config.setting import about

ALLOWED = "a whole number of epochs of at least 1, or text as in '500 steps' or '2 epochs'"


class Every(NamedTuple):
    """So many slots of the axis, or so many epochs; never a rank's own count of steps."""

    number: int
    unit: Literal["steps", "epochs"]


def read_every(value: Any) -> Every | None:
    """The interval that a user wrote; None where it is none."""
    if isinstance(value, int) and not isinstance(value, bool):
        return Every(value, "epochs") if value >= 1 else None
    found = re.fullmatch(r"(?:([1-9][0-9_]*) ?)?(step|epoch)s?", value.strip()) if isinstance(value, str) else None
    if found is None:
        return None
    return Every(int(found[1] or 1), "steps" if found[2] == "step" else "epochs")


def about_every(help: str, default: str) -> dict[str, Any]:
    """The metadata of a setting that is an interval; `default` describes what None means."""
    return about(help, accepts=lambda value: read_every(value) is not None, allowed=ALLOWED, default=default)
