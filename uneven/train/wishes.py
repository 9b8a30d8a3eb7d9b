"""When this rank wants a checkpoint or an evaluation that no slot of the axis asks for: by time, or by request.

Rank 0's clock decides on intervals of time. The wish travels with the next gradient sum or round,
and all ranks meet at the slot that follows from it, so no rank's clock has to agree with another's. All ranks note when
they met: whoever is rank 0 after a loss goes on with the interval.
"""

from collections.abc import Iterable, Sequence
from enum import IntFlag

from uneven.config import Every
from uneven.policy.events import Events
from uneven.policy.recorded import RecordedWindows
from uneven.policy.round_report import RoundReport
from uneven.policy.slot_schedule import first_free_slot
from uneven.policy.windows import Windows
from uneven.train.elastic.membership import Membership
from uneven.train.rank_info import RankInfo
from uneven.train.requests import Requests


class Wish(IntFlag):
    """What a rank wants at the next slot where all ranks can meet: it travels in the sum that ranks exchange anyway."""

    NONE = 0
    SAVE = 1  # an interval of time is over, or the user asked for a checkpoint
    EVALUATE = 2
    LEAVE = 4  # the rank leaves the run; what it has trained is in this very exchange (train/elastic/settler.py)


def wished(values: Iterable[float]) -> Wish:
    """What any rank wants, of the numbers that arrived."""
    found = 0
    for value in values:
        found |= int(value)
    return Wish(found) if found else Wish.NONE


class Wishes:
    """Life cycle: `start` with training, `ask` in every exchange of the ranks, `saved` and `evaluated` afterwards."""

    def __init__(
        self,
        save: Every | None,
        evaluation: Every | None,
        requests: Requests,
        rank_info: RankInfo,
        *,
        is_replay: bool = False,
    ) -> None:
        self.requests = requests
        self.membership: Membership | None = None  # where this rank may be asked to leave
        self._rank_info = rank_info  # asked each time: another rank becomes rank 0 where that one is lost or leaves
        self._save_ns = _interval_ns(save)
        self._eval_ns = _interval_ns(evaluation)
        self._is_replay = is_replay  # it follows its log alone
        self._has_started = False
        self._saved_ns = 0
        self._evaluated_ns = 0

    def start(self, now_ns: int) -> None:
        """Training begins: intervals count from here, also where training goes on with other ranks later. Else an
        interval longer than a generation of ranks would never end.
        """
        if not self._has_started:
            self._has_started = True
            self._saved_ns = self._evaluated_ns = now_ns

    def ask(self, now_ns: int) -> Wish:
        if self._is_replay:
            return Wish.NONE
        wish = Wish.SAVE if self.requests.save.is_set() else Wish.NONE
        if self.membership is not None and self.membership.is_leaving():
            wish |= Wish.LEAVE
        if self._rank_info.rank != 0:
            return wish
        if self._save_ns is not None and now_ns - self._saved_ns >= self._save_ns:
            wish |= Wish.SAVE
        if self._eval_ns is not None and now_ns - self._evaluated_ns >= self._eval_ns:
            wish |= Wish.EVALUATE
        return wish

    def saved(self, now_ns: int) -> None:
        self._saved_ns = now_ns
        self.requests.save.clear()

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
        if request_event(events, slot, wish, windows.last_event):
            windows.learn_event(slot)
    return wish


def _interval_ns(every: Every | None) -> int | None:
    return int(every.number * 1e9) if every is not None and every.unit == "seconds" else None
