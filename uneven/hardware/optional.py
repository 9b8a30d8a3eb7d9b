"""What a machine may not have, or not let us read: the value, or None."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")


def or_none(call: Callable[[], _T]) -> _T | None:
    """The result of `call`, or None where this version of torch, driver or binding does not support it."""
    try:
        return call()
    except Exception:  # also NVMLError, AttributeError of an old binding, ctypes errors
        return None


def read_text(path: Path) -> str | None:
    """The text of a file in /proc or /sys; None if it is absent, unreadable or vanishes while it is read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return None


def read_int(path: Path) -> int | None:
    """The integer that is the whole content of a file, or None."""
    try:
        return int((read_text(path) or "").strip())
    except ValueError:
        return None
