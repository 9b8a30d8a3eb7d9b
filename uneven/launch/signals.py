"""SIGTERM as a request to stop and save, within `grace` seconds; and Ctrl-C where the default would not save.

For the process that a user, a scheduler or torchrun signals: a script alone and a rank under torchrun (launch/run.py,
api/fit.py), the launcher of `uneven run` (launch/script.py). Our own rank processes only note a signal (RankSignal):
their heartbeats tell the launcher, which then stops the whole run.

[Note: nothing is done in a signal handler] It runs between two bytecodes of the main thread, which may hold any lock
just then: setting an Event there can wait forever for the main thread itself. So a handler puts the signal's number
into a SimpleQueue, whose put may be interrupted by itself, and a thread does the rest.
"""

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from uneven.errors import Terminated
from uneven.launch.cleanup import end_all_runs
from uneven.train.requests import Requests

SAME_S = 1.0  # `timeout` sends its signal twice, to the process and to its group: that is one request
PUT_AWAY_S = 15.0  # to tell other machines and to remove what is there, where nothing has to be saved
DEFAULTS: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}


@dataclass(eq=False)
class Stoppable:
    """A run, as the signals see it. `stop(number)` is called on their thread, once.

    `may_leave`, asked in the handler: the main thread may be interrupted where it is, nothing of the run is half done.
    """

    grace: Callable[[], float]
    stop: Callable[[int], None]
    may_leave: Callable[[], bool] = lambda: False
    is_cut_by_second: bool = True  # not under torchrun, which passes on what a scheduler may have sent us already
    received: int | None = None  # the signal that has come


class _Received(NamedTuple):
    """A signal on its way to the thread: negative where a rank got it, 0 to interrupt the main thread."""

    number: int
    at_s: float
    runs: tuple[Stoppable, ...]  # that were on when it came: one may end before the thread has read this


class StopSignals:
    """One per process, `SIGNALS`. Handlers are ours from the first `add` on the main thread until no run is on.

    Only default handlers are replaced. With a handler of the user's own nothing changes: it may call `run.stop()`.
    """

    def __init__(self) -> None:
        self._stoppables: list[Stoppable] = []
        self._before: dict[int, Any] = {}  # the handlers that ours replaced
        self._received: list[int] = []
        self._has_left = False  # Terminated was raised in the main thread
        self._pid = 0
        self._queue: queue.SimpleQueue[_Received | None] = queue.SimpleQueue()

    def add(self, stoppable: Stoppable, *numbers: int) -> None:
        """The run begins. On another thread than the main one no handler can be set, and none is."""
        self.restore()  # a run that ended on another thread could not
        self._stoppables.append(stoppable)
        if not is_main_thread():
            return
        for number in numbers:
            if number not in self._before and signal.getsignal(number) == DEFAULTS[number]:
                if not self._before:
                    self._begin()
                self._before[number] = signal.signal(number, self._handle)

    def discard(self, stoppable: Stoppable, *, is_joined: bool = False) -> None:
        """The run is over and saved. On the main thread the handlers are restored with the last one.

        On another thread, after a SIGTERM, the main one is interrupted wherever it is, unless it waits for this run.
        """
        with suppress(ValueError):
            self._stoppables.remove(stoppable)
        if is_main_thread():
            self.restore()
        elif not is_joined and signal.SIGTERM in self._received and all(one.may_leave() for one in self._stoppables):
            self._queue.put(_Received(0, 0.0, ()))  # the main thread may be anywhere

    def restore(self) -> None:
        """On the main thread: give the handlers back where no run is on."""
        if self._stoppables or not self._before or not is_main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before)
        self._before.clear()
        self._queue.put(None)

    def receive(self) -> bool:
        """As if SIGTERM had come, for a rank that got it; False where this process does not handle it."""
        if signal.SIGTERM not in self._before:
            return False
        if signal.SIGTERM not in self._received:
            # A scheduler's signal to all processes is one: ours may come yet.
            self._queue.put(_Received(-signal.SIGTERM, time.monotonic(), tuple(self._stoppables)))
            self._received.append(signal.SIGTERM)
        return True

    def leave(self) -> None:
        """Terminated, once in the main thread and always in others: the run is saved, the process is to end."""
        if not is_main_thread():
            raise Terminated
        had_left, self._has_left = self._has_left, True  # before the handlers go: no more signals from our thread
        self.restore()
        if not had_left:
            raise Terminated

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._has_left = False
        self._received, self._queue = [], queue.SimpleQueue()
        threading.Thread(target=self._watch, args=(self._queue,), name="uneven-signals", daemon=True).start()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """On the main thread; see [Note: nothing is done in a signal handler]."""
        on = tuple(self._stoppables)
        is_again = number in self._received
        if os.getpid() != self._pid or (not on and not is_again):  # a fork of ours, or no run is on any more
            act_by_default(number, frame)
            return
        if not on:
            self._leave_here()
            return
        may_leave = all(one.may_leave() for one in on)
        for one in on:
            one.received = number
        if number == signal.SIGINT and (is_again or may_leave):
            signal.default_int_handler(number, frame)
        self._queue.put(_Received(number, time.monotonic(), on))
        self._received.append(number)  # after it: whoever sees it here may put the next one
        if may_leave:
            self._leave_here()

    def _leave_here(self) -> None:
        if not self._has_left:
            self._has_left = True
            raise Terminated

    def _watch(self, signals: "queue.SimpleQueue[_Received | None]") -> None:
        """On a thread: pass the first signal on; end the process at a second SIGTERM, or when the grace is over."""
        if (first := signals.get()) is None:
            return
        number, began_s = abs(first.number), first.at_s
        on = first.runs
        own = first.number > 0  # whether this process itself has got it
        is_over = False  # the run, and the main thread is to end
        for one in on:
            one.stop(number)
        while True:
            grace_s = max((one.grace() for one in on), default=0.0)
            try:
                again = signals.get(timeout=max(0.0, min(1.0, began_s + grace_s - time.monotonic())))
            except queue.Empty:
                if time.monotonic() >= began_s + grace_s:
                    saved = "not saved" if self._stoppables else "saved, but the script did not end"
                    end_process(number, f"{saved} within grace={grace_s:g} s: ended")
                # Again: one that comes just before the main thread begins to wait does not end that wait.
                if is_over and not self._has_left and not self._stoppables:
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
                continue
            if again is None:
                return
            if again.number == 0:
                is_over = True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
            elif not own:
                own = True
            elif again.at_s - began_s > SAME_S and all(one.is_cut_by_second for one in on):
                end_process(
                    again.number, f"a second {signal.Signals(again.number).name}: ended at once, nothing was saved"
                )


SIGNALS = StopSignals()


class SignalledRequests(Requests):
    """Of a process whose ranks may be signalled, too: a rank's SIGTERM is taken for one of its own, if it handles that.

    If it does not, its ranks stop, and `ends_process` says whether it ends with them.
    """

    def __init__(self, grace: float, *, ends_process: bool) -> None:
        super().__init__(grace)
        self._ends_process = ends_process

    def rank_signalled(self, number: int) -> None:
        if number == signal.SIGTERM and SIGNALS.receive():
            return
        self.signalled(number if self._ends_process else signal.SIGINT)


@contextmanager
def terminated_while_waiting() -> Iterator[Stoppable]:
    """Around a time without ranks, in which nothing is to be saved: SIGTERM raises Terminated in the main thread.

    So whatever was opened is put away, and other machines are told, as after Ctrl-C. A run that begins in the block
    takes its place: it adds its own Stoppable, and discards this one.
    """
    waiting = Stoppable(lambda: PUT_AWAY_S, lambda _: None, lambda: True)
    SIGNALS.add(waiting, signal.SIGTERM)
    try:
        yield waiting
    finally:
        SIGNALS.discard(waiting)


class RankSignal:
    """In a rank process of ours: a signal is only noted. The heartbeat tells the launcher, which stops all ranks.

    A rank that stopped by itself would leave the others with a run that is over early, and a script that goes on with
    what it has trained so far.
    """

    def __init__(self, number: int, error: type[BaseException]) -> None:
        self._number, self._error = number, error
        self.was_received = False
        self._is_interrupted = False
        self._pid = os.getpid()
        signal.signal(number, self._handle)

    def interrupt(self) -> None:
        """From another thread: raise the error in the main thread, wherever it is, and end a sleep or a read."""
        self._is_interrupted = True
        signal.pthread_kill(threading.main_thread().ident or 0, self._number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            act_by_default(number, frame)
        elif self._is_interrupted:
            self._is_interrupted = False
            raise self._error
        else:
            self.was_received = True


def first_received(signals: Mapping[int, RankSignal]) -> int:
    """The number of one that this process has got, else 0."""
    return next((number for number, one in signals.items() if one.was_received), 0)


def act_by_default(number: int, frame: FrameType | None) -> None:
    """What the signal would do without a handler."""
    if number == signal.SIGINT:
        signal.default_int_handler(number, frame)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def end_process(number: int, why: str) -> NoReturn:
    """End all ranks and this process at once, as the signal would have."""
    end_all_runs()
    with suppress(OSError):
        os.write(2, f"uneven: {why}\n".encode())  # not through a stream, whose lock the main thread may hold
    os._exit(128 + number)


def is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
