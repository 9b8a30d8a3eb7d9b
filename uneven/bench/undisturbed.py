"""Detects and marks measurements that other programs disturbed; every benchmark measures speed through this module.

[Note: disturbed figures] The interference of other programs is sampled during every measurement (see
hardware/interference.py). A disturbed measurement is repeated once. If it is disturbed again, its figure gets a mark
and a footnote (in JSON `is_disturbed` and `interference`), and no conclusion is drawn from it: no best mode, no
speed-up, no "as fast as". Reason: on a two-core virtual machine with 27 % stolen time the demo once concluded from such
a figure that PyTorch's DDP did 0.04x of one device; a second run was 13 times faster.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from uneven.hardware.interference import Interference, measure_interference

T = TypeVar("T")

MARK = "*"
FOOTNOTE = f"{MARK} disturbed: other programs took CPU time from this measurement; compare nothing with this figure"
REPEAT_LIMIT_S = 60.0  # a longer measurement is marked without a second try, which would take too long


def measure_undisturbed(measure: Callable[[], T], repeat_limit_s: float = REPEAT_LIMIT_S) -> tuple[T, Interference]:
    """The result of `measure` and the interference while it ran; repeated once if it was disturbed and short enough."""
    for _ in range(2):
        with measure_interference() as span:
            value = measure()
        if not span.interference.is_disturbed or span.interference.seconds > repeat_limit_s:
            break
    return value, span.interference


def to_marks(interference: Interference) -> dict[str, Any]:
    """The two fields that every record of a speed has, in JSON and in table rows."""
    return {"is_disturbed": interference.is_disturbed, "interference": interference.to_json()}


def mark(text: str, is_marked: bool) -> str:
    """The text of a table cell, with the mark if it is disturbed; empty cells get none."""
    return f"{text}{MARK}" if is_marked and text else text
