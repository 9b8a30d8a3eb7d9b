"""Slots that change hands in `cadence`: a rank that is late enters the round and hands back what it has not begun.

A window's slots are divided beforehand, so a rank that becomes ten times slower would keep all others waiting for ten
windows. When the window's time is over and half of it would pass again before such a rank is through, it enters with
what it has trained. Its other slots go to all ranks in the next window, but for those that its feed has loaded already:
it keeps these. All ranks know every rank's slots of a window, so two numbers in its report are enough. Pure; called by
policy/windows.py and policy/slot_schedule.py.
"""

from collections.abc import Iterable, Sequence

from uneven.policy.finish import by_ratio
from uneven.policy.round_report import RoundReport

LATE = 0.5  # of the window's planned time: what a late rank would need beyond it
RECENT = 5  # slots in the median of a rank's pace: two outliers change nothing
ENOUGH = 3  # slots from which on the pace is believed


def is_late(busy_ms: float, planned_ms: float, held: int, recent_ms: float) -> bool:
    """Whether a rank that holds so many slots at the end of the window's time would keep the others waiting."""
    return 0.0 < planned_ms <= busy_ms and held * recent_ms > LATE * planned_ms


def recent_time(recent_ms: Iterable[float]) -> float:
    """The typical time of a rank's last RECENT slots (the lower median); 0 where they are too few."""
    last = sorted(recent_ms)
    return last[(len(last) - 1) // 2] if len(last) >= ENOUGH else 0.0


def split_beside(kept: Sequence[int], ratio: Sequence[float], slots: int) -> tuple[int, ...]:
    """How many of `slots` each rank gets, by `ratio`, where some still have `kept` ones of an earlier window."""
    taking = [part > 0 for part in ratio]
    while True:
        held = sum(count for count, takes in zip(kept, taking, strict=True) if takes)
        parts = [part if takes else 0.0 for part, takes in zip(ratio, taking, strict=True)]
        whole = by_ratio(parts, slots + held)
        full = [takes and has > count for takes, has, count in zip(taking, kept, whole, strict=True)]
        if not any(full):
            return tuple(count - has if takes else 0 for count, has, takes in zip(whole, kept, taking, strict=True))
        taking = [takes and not is_full for takes, is_full in zip(taking, full, strict=True)]


def taken_back(owned: Sequence[Sequence[int]], reports: Sequence[RoundReport]) -> tuple[list[int], list[list[int]]]:
    """What ranks have handed back, and what each keeps; `owned`: every rank's slots of the window, in order."""
    back: list[int] = []
    kept: list[list[int]] = []
    for slots, report in zip(owned, reports, strict=True):
        stop = len(slots) - int(report.returned)
        back += slots[stop:]
        kept.append(list(slots[stop - int(report.kept) : stop]))
    return sorted(back), kept
