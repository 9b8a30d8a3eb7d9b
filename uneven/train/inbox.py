"""What is asked of a rank: to stop, to leave, or a checkpoint or an evaluation that no slot of the axis asks for.

By a signal, the command line, a callback or an interval of time. A rank reads it with every exchange, as a value.

Rank 0's clock decides on intervals of time. The wish travels with the next gradient sum or round, and all ranks meet at
the slot that follows from it, so no rank's clock has to agree with another's. All ranks note when they met: whoever is
rank 0 after a loss goes on with the interval.
"""

from collections.abc import Iterable, Sequence
from enum import IntFlag
from typing import NamedTuple

from uneven.comm.clock import Clock
from uneven.config import Every, RunConfig, read_every
from uneven.policy.events import Events
from uneven.policy.recorded import RecordedWindows
from uneven.policy.round_report import RoundReport
from uneven.policy.slot_schedule import first_free_slot
from uneven.policy.windows import Windows
from uneven.train.callbacks import CallbackRunner
from uneven.train.membership import Membership
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


class Asked(NamedTuple):
    """What is asked of a rank at a moment."""

    is_stopping: bool  # to end the run
    wish: Wish


class Inbox:
    """Life cycle: `start` with training, `read` in every exchange of the ranks, `saved` and `evaluated` afterwards."""

    def __init__(
        self,
        config: RunConfig,
        evaluation: Every | None,
        requests: Requests,
        callbacks: CallbackRunner,
        rank_info: RankInfo,
        clock: Clock,
    ) -> None:
        self.requests = requests
        self._callbacks = callbacks
        self._membership: Membership | None = None  # where this rank may be asked to leave
        self._rank_info = rank_info  # asked each time: another rank becomes rank 0 where that one is lost or leaves
        self._save_ns = _interval_ns(read_every(config.save_every))
        self._eval_ns = _interval_ns(evaluation)
        self._is_replay = config.replay is not None  # it follows its log alone
        self._clock = clock
        self._has_started = False
        self._saved_ns = 0
        self._evaluated_ns = 0

    def may_leave(self, membership: Membership) -> None:
        """From now on this rank may be asked to leave the run."""
        self._membership = membership

    def start(self) -> None:
        """Training begins: intervals count from here, also where training goes on with other ranks later. Else an
        interval longer than a generation of ranks would never end.
        """
        if not self._has_started:
            self._has_started = True
            self._saved_ns = self._evaluated_ns = self._clock()

    def read(self) -> Asked:
        return Asked(self.requests.stop.is_set() or self._callbacks.is_stopping(), self._wish())

    def _wish(self) -> Wish:
        if self._is_replay:
            return Wish.NONE
        wish = Wish.SAVE if self.requests.save.is_set() else Wish.NONE
        if self._membership is not None and self._membership.is_leaving():
            wish |= Wish.LEAVE
        if self._rank_info.rank != 0 or (self._save_ns is None and self._eval_ns is None):
            return wish
        now_ns = self._clock()
        if self._save_ns is not None and now_ns - self._saved_ns >= self._save_ns:
            wish |= Wish.SAVE
        if self._eval_ns is not None and now_ns - self._evaluated_ns >= self._eval_ns:
            wish |= Wish.EVALUATE
        return wish

    def saved(self) -> None:
        self._saved_ns = self._clock()
        self.requests.save.clear()

    def evaluated(self) -> None:
        self._evaluated_ns = self._clock()


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
