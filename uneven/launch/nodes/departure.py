"""A joined machine that goes on purpose, on its own side: who wants it to, and what the leader says. No torch here.

Held by launch/nodes/node.py. A signal, or `uneven leave` on this machine, makes the ranks here hand in what they have
trained and leave; the leader lets them (launch/watch/turnover.py), or says why not.
"""

import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from uneven.launch.control.leave_requests import ENDS, RequestFiles
from uneven.machines.session import Session

SIGNAL = "signal"  # the name of the request that is no file


class Departure:
    """Life cycle: one per joined machine and run; `look` often, `hear` what the leader answers, on one thread."""

    def __init__(self, session: Session, folder: Path, say: Callable[[str], None]) -> None:
        self._session, self._files, self._say = session, RequestFiles(folder), say
        self._names: set[str] = set()  # of requests by files that are not answered
        self._signal: int | None = None
        self.has_left = False  # all ranks here have left on purpose

    def on_signal(self, number: int) -> None:
        """SIGTERM or Ctrl-C, on the signals' thread: leave; a second one ends this process (launch/signals.py)."""
        self._signal = number
        self._say(f"{signal.Signals(number).name}: this machine hands in what it has trained and leaves")
        self._session.send(leave=SIGNAL, is_urgent=1)

    def look(self) -> None:
        """Pass on what was asked for since, and what was withdrawn."""
        for name, ranks in self._files.take().items():
            self._names.add(name)
            self._session.send(leave=name, ranks=ranks)
        for name in [name for name in self._names if not self._files.is_open(name)]:
            self._names.discard(name)
            self._session.send(stays=name)

    def hear(self, message: Mapping[str, Any]) -> None:
        """The leader's answer to one of the requests."""
        name = message["answer"]
        answer = {key: message[key] for key in ("left", "refused") if key in message}
        if name == SIGNAL:
            if answer.get("refused", ENDS) != ENDS:
                self._say(f"the run cannot go on without this machine ({answer['refused']}): it stops, and is saved")
                self._session.send(stop=self._signal)
        elif name in self._names and self._files.is_open(name):
            self._names.discard(name)
            self._files.answer(name, answer)
