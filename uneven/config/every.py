"""An interval as a user writes it: 2 (epochs), "2 epochs", "500 steps", "10 min". Pure: imports no torch."""

import math
import re
from typing import Any, Literal, NamedTuple

from uneven.config.setting import about

ALLOWED = "a whole number of epochs of at least 1, or text as in '500 steps', '2 epochs', '10 min', '30 s' or '1.5 h'"
SECONDS = {"s": 1.0, "sec": 1.0, "second": 1.0, "min": 60.0, "minute": 60.0, "h": 3600.0, "hr": 3600.0, "hour": 3600.0}


class Every(NamedTuple):
    """So many slots of the axis, or so many epochs, never a rank's own count of steps; or so long by rank 0's clock."""

    number: int | float
    unit: Literal["steps", "epochs", "seconds"]


def read_every(value: Any) -> Every | None:
    """The interval that a user wrote; None where it is none."""
    if isinstance(value, int) and not isinstance(value, bool):
        return Every(value, "epochs") if value >= 1 else None
    text = value.strip() if isinstance(value, str) else ""
    if found := re.fullmatch(r"(?:([1-9][0-9_]*) ?)?(step|epoch)s?", text):
        return Every(int(found[1] or 1), "steps" if found[2] == "step" else "epochs")
    if found := re.fullmatch(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+) ?([a-z]+)", text):
        unit = found[2].removesuffix("s") if len(found[2]) > 2 else found[2]
        seconds = float(found[1]) * SECONDS.get(unit, 0.0)
        return Every(seconds, "seconds") if 0.0 < seconds < math.inf else None
    return None


def about_every(help: str, default: str) -> dict[str, Any]:
    """The metadata of a setting that is an interval; `default` describes what None means."""
    return about(help, accepts=lambda value: read_every(value) is not None, allowed=ALLOWED, default=default)
