"""When this rank wants a checkpoint or an evaluation that no slot of the axis asks for: by time, or by request.

Rank 0's clock decides on intervals of time. The wish travels with the next gradient sum or round (synchronizer.Wish),
and all ranks meet at the slot that follows from it, so no rank's clock has to agree with another's. All ranks note when
they met: whoever is rank 0 after a loss goes on with the interval.
"""

import threading
from collections.abc import Callable, Sequence

from uneven.config import Every
from uneven.policy.events import Events
from uneven.policy.recorded import RecordedWindows
from uneven.policy.round_report import RoundReport
from uneven.policy.slot_schedule import first_free_slot
from uneven.policy.windows import Windows
from uneven.train.synchronizer import Wish, wished


class Wishes:
    """Life cycle: `start` with training, `ask` in every exchange of the ranks, `saved` and `evaluated` afterwards.

    `is_lead` is asked each time, since another rank becomes rank 0 where that one is lost or leaves.
    """

    def __init__(
        self, save: Every | None, evaluation: Every | None, requested: threading.Event, is_lead: Callable[[], bool]
    ) -> None:
        self.requested = requested  # a checkpoint, by the user, from any thread
        self._is_lead = is_lead
        self._save_ns, self._eval_ns = _interval_ns(save), _interval_ns(evaluation)
        self._has_started = False
        self._saved_ns = self._evaluated_ns = 0

    def start(self, now_ns: int) -> None:
        """Training begins: intervals count from here, also where training goes on with other ranks later. Else an
        interval longer than a generation of ranks would never end.
        """
        if not self._has_started:
            self._has_started = True
            self._saved_ns = self._evaluated_ns = now_ns

    def ask(self, now_ns: int) -> Wish:
        wish = Wish.SAVE if self.requested.is_set() else Wish.NONE
        if not self._is_lead():
            return wish
        if self._save_ns is not None and now_ns - self._saved_ns >= self._save_ns:
            wish |= Wish.SAVE
        if self._eval_ns is not None and now_ns - self._evaluated_ns >= self._eval_ns:
            wish |= Wish.EVALUATE
        return wish

    def saved(self, now_ns: int) -> None:
        self._saved_ns = now_ns
        self.requested.clear()

    def evaluated(self, now_ns: int) -> None:
        self._evaluated_ns = now_ns


def request_event(events: Events, slot: int, wish: Wish, passed: int) -> bool:
    """Make this slot an event, unless another one that is still to come was requested; returns whether it is one now.

    On all ranks alike, before any of them has passed it. `passed`: the last event.
    """
    saves = bool(wish & Wish.SAVE) and not any(known > passed for known in events.extra_saves)
    evaluates = bool(wish & Wish.EVALUATE) and not any(known > passed for known in events.extra_evaluations)
    if saves:
        events.request_save(slot)
    if evaluates:
        events.request_evaluation(slot)
    return saves or evaluates


def follow_wish(events: Events, windows: Windows | RecordedWindows, rows: Sequence[RoundReport]) -> Wish:
    """Where a rank wants to save or evaluate, make the first slot at which all ranks can still meet an event.

    Returns what any rank wants. Call it on all ranks before `windows` notes the round. A wish is repeated until that
    slot is reached.
    """
    wish = wished(row.wish for row in rows)
    if wish and isinstance(windows, Windows):
        slot = first_free_slot(rows, windows.event)
        if request_event(events, slot, wish, windows.passed):
            windows.learn_event(slot)
    return wish


def _interval_ns(every: Every | None) -> int | None:
    return int(every.number * 1e9) if every is not None and every.unit == "seconds" else None
