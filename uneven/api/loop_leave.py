"""How a loop of the user's own is left before its end: by a wrong use on one rank, or an error on all of them."""

from contextlib import suppress
from typing import NoReturn

from uneven.api.loop_view import LoopView
from uneven.errors import InputError, LeftLoopError, RankError
from uneven.train.status import RankStatus


class LoopLeaving(LoopView):
    """The part of Loop (api/loop.py) by which no rank waits for one that does not come."""

    _broken: str | None = None  # why no call is possible any more
    _is_untold = False  # and the other ranks do not know

    def _leave_epoch(self, why: str, is_sent: bool = True) -> None:
        """The other ranks are told at once, or with this rank's next call."""
        if self._broken is not None or self._state is not None:
            return
        self._steps.drop()
        self._broken = f"{why}: take all batches of ddp.batches(epoch), with one ddp.step(loss) each, or skip_rest()"
        self._is_untold = not is_sent
        if is_sent:
            self._tell_left()

    def _tell_left(self) -> None:
        self._is_untold = False
        if self.world_size > 1:
            with suppress(RuntimeError):  # the other ranks may have ended already
                self._synchronizer.exchange_status(RankStatus.LEFT_EPOCH)
        self._leave()

    def _fail(self, message: str) -> NoReturn:
        """A wrong use on this rank: raise here, and send the status so that the other ranks do not wait."""
        self._leave_epoch(f"rank {self.rank}: {message}")
        raise InputError(message) from None  # it says it all: what it came from is the same, in frames of ours

    def _raise_for_all(self, message: str, kind: type[RankError] = RankError) -> NoReturn:
        self._broken = message
        self._leave()
        raise kind(message) from None

    def _check_usable(self) -> None:
        if self._broken is not None:
            if self._is_untold:
                self._tell_left()
            raise LeftLoopError(self._broken)
        if self._state is not None:
            raise InputError("this loop is finished; call Ddp.setup again to train on")

    def _leave(self) -> None:
        """Close the group without any collective."""
        raise NotImplementedError
