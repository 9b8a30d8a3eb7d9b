"""Settings as text, as an option, a file or an environment variable holds them -> their values. Imports no torch.

An interval: 2 (epochs), "2 epochs", "500 steps", "10 min". Checks to leave out: "data,clock".
"""

import math
import re
from typing import Any, Literal, NamedTuple

from uneven.config.setting import Setting
from uneven.errors import InputError

WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
SECONDS = {"s": 1.0, "sec": 1.0, "second": 1.0, "min": 60.0, "minute": 60.0, "h": 3600.0, "hr": 3600.0, "hour": 3600.0}
INTERVAL = "a whole number of epochs of at least 1, or text as in '500 steps', '2 epochs', '10 min', '30 s' or '1.5 h'"
# Models are always compared: a collective over tensors of other shapes corrupts data or hangs.
SKIPPABLE = ("uneven", "python", "torch", "nccl", "code", "dtype", "clock", "links", "data")


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


def read_skip(text: str | None) -> tuple[str, ...]:
    """'data, clock' -> ('data', 'clock')."""
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


def is_interval(value: Any) -> bool:
    return read_every(value) is not None


def is_skip(value: Any) -> bool:
    words = read_skip(value) if isinstance(value, str) else ()
    return bool(words) and set(words) <= set(SKIPPABLE)


def numbers(option: str, text: str) -> tuple[float, ...]:
    """ "5,2" -> (5.0, 2.0); InputError with the option's name where an entry is no number."""
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        raise InputError(f"{option} {text!r} must be numbers with commas between them, as in 5,2") from None


def parse_text(setting: Setting, text: str, name: str) -> Any:
    """The value of a setting that was written as text; one that cannot be read stays text, for the setting's check.

    `name` is where it was written, as in --shares or UNEVEN_SHARES.
    """
    if setting.takes_none and text == "none":
        return None
    if bool in setting.members:
        return WORDS.get(text.lower(), text)
    if setting.is_list:
        entries = numbers(name, text)
        if int not in setting.members:
            return entries
        whole = tuple(int(entry) if entry.is_integer() else entry for entry in entries)
        return whole if len(whole) > 1 else whole[0]
    if int in setting.members and text.isdecimal():
        return int(text)
    return number_or_word(text) if float in setting.members else text


def number_or_word(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
