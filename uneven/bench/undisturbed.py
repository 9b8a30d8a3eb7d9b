"""Detects and marks measurements that other programs disturbed; every benchmark measures speed through this module.

[Note: disturbed figures] The interference of other programs is sampled during every measurement (see
hardware/interference.py). A disturbed measurement is repeated once. If it is disturbed again, its figure gets a mark
and a footnote (in JSON `is_disturbed` and `interference`), and no conclusion is drawn from it: no best mode, no
speed-up, no "as fast as". Reason: on a two-core virtual machine with 27 % stolen time the demo once concluded from such
a figure that PyTorch's DDP did 0.04x of one device; a second run was 13 times faster.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from uneven.hardware.interference import Interference, measure_interference

T = TypeVar("T")

MARK = "*"
FOOTNOTE = f"{MARK} disturbed: other programs took CPU time from this measurement; compare nothing with this figure"
REPEAT_LIMIT_S = 60.0  # a longer measurement is marked without a second try, which would take too long


def measure_undisturbed(measure: Callable[[], T], repeat_limit_s: float = REPEAT_LIMIT_S) -> tuple[T, Interference]:
    """The result of `measure` and the interference while it ran; repeated once if it was disturbed and short enough."""
    value, interference = _measure_once(measure)
    if interference.is_disturbed and interference.seconds <= repeat_limit_s:
        value, interference = _measure_once(measure)
    return value, interference


def _measure_once(measure: Callable[[], T]) -> tuple[T, Interference]:
    with measure_interference() as span:
        value = measure()
    return value, span.interference


def to_marks(interference: Interference) -> dict[str, Any]:
    """The two fields that every record of a speed has, in JSON and in table rows."""
    return {"is_disturbed": interference.is_disturbed, "interference": interference.to_json()}


def is_disturbed(record: Mapping[str, Any]) -> bool:
    """Whether a summary or another JSON record is marked; older records without the field count as undisturbed."""
    return bool(record.get("is_disturbed", False))


def mark(text: str, is_marked: bool) -> str:
    """The text of a table cell, with the mark if it is disturbed; empty cells get none."""
    return f"{text}{MARK}" if is_marked and text else text
