"""A joined machine that goes on purpose, on its own side: who wants it to, and what the leader says. No torch here.

Held by launch/nodes/node.py. A signal, `uneven leave` on this machine, or somebody who needs it (hardware/presence.py)
make the ranks here hand in what they have trained and leave; the leader lets them (launch/watch/leaving.py), or says
why not.
"""

import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from uneven.hardware.presence import POLL_S, Answer, Machine, Presence, Readings
from uneven.launch.control.leave_requests import ENDS, RequestFiles
from uneven.machines.session import Session

SIGNAL, NEEDED = "signal", "needed"  # the names of requests that are not files


class Departure:
    """Life cycle: one per joined machine and run; `look` often, `hear` what the leader answers, on one thread."""

    def __init__(
        self,
        session: Session,
        folder: Path,
        presence: Presence | None,
        say: Callable[[str], None],
        read: Callable[[], Readings] | None = None,
    ) -> None:
        self._session, self._files, self._say = session, RequestFiles(folder), say
        self._presence = presence
        self._read = Machine().read if read is None else read
        self._read_s = 0.0
        self._names: set[str] = set()  # of requests by files that are not answered
        self._needed: Answer | None = None  # why this machine is to leave, while it is
        self._signal: int | None = None
        self._was_asked = False  # by `uneven leave`
        self.has_left = False  # all ranks here have left on purpose

    @property
    def may_return(self) -> bool:
        """Whether it has left only because somebody needed the machine."""
        return self.has_left and self._needed is not None and self._signal is None and not self._was_asked

    def on_signal(self, number: int) -> None:
        """SIGTERM or Ctrl-C, on the signals' thread: leave; a second one ends this process (launch/signals.py)."""
        self._signal = number
        self._say(f"{signal.Signals(number).name}: this machine hands in what it has trained and leaves")
        self._session.send(leave=SIGNAL, is_urgent=1)

    def look(self) -> None:
        """Pass on what was asked for since, and what was withdrawn; ask the machine itself now and then."""
        for name, ranks in self._files.take().items():
            self._names.add(name)
            self._session.send(leave=name, ranks=ranks)
        for name in [name for name in self._names if not self._files.is_open(name)]:
            self._names.discard(name)
            self._session.send(stays=name)
        if self._presence is not None and time.monotonic() - self._read_s >= POLL_S:
            self._read_s = time.monotonic()
            self._follow(self._presence.answer(self._read()))

    def _follow(self, answer: Answer) -> None:
        if not answer.may and self._needed is None:
            self._needed = answer
            self._say(f"this machine is needed ({answer.why}): it hands in what it has trained and leaves")
            self._session.send(leave=NEEDED, waits=1)
        elif answer.may and self._needed is not None:
            self._needed = None
            self._session.send(stays=NEEDED)

    def hear(self, message: Mapping[str, Any]) -> None:
        """The leader's answer to one of the requests."""
        name = str(message["answer"])
        answer = {key: message[key] for key in ("left", "refused", "waits") if key in message}
        if name == SIGNAL:
            if answer.get("refused", ENDS) != ENDS:
                self._say(f"the run cannot go on without this machine ({answer['refused']}): it stops, and is saved")
                self._session.send(stop=self._signal)
        elif name == NEEDED:
            if "waits" in answer:
                self._say(f"it cannot leave now ({answer['waits']}): it stays until it can")
        elif self._files.is_open(name):
            self._names.discard(name)
            self._was_asked |= "left" in answer
            self._files.answer(name, answer)
