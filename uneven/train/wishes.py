"""When this rank wants a checkpoint or an evaluation that no slot of the axis asks for: by time, or by request.

Rank 0's clock decides on intervals of time. The wish travels with the next gradient sum or round (synchronizer.Wish),
and all ranks meet at the slot that follows from it, so no rank's clock has to agree with another's.
"""

import threading

from uneven.config import Every
from uneven.train.synchronizer import Wish


class Wishes:
    """Asked in every exchange of the ranks; told when what was wished for is done."""

    def __init__(self, save: Every | None, evaluation: Every | None, requested: threading.Event, is_lead: bool) -> None:
        self.requested = requested  # a checkpoint, by the user, from any thread
        self._save_ns = _interval_ns(save) if is_lead else None
        self._eval_ns = _interval_ns(evaluation) if is_lead else None
        self._saved_ns = self._evaluated_ns = 0

    def start(self, now_ns: int) -> None:
        """Training begins: intervals count from here."""
        self._saved_ns = self._evaluated_ns = now_ns

    def ask(self, now_ns: int) -> Wish:
        wish = Wish.SAVE if self.requested.is_set() else Wish.NONE
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


def _interval_ns(every: Every | None) -> int | None:
    return int(every.number * 1e9) if every is not None and every.unit == "seconds" else None
