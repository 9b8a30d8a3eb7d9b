"""Members of a run, and a group that forms by nobody."""

import threading
import time
from collections.abc import Callable
from typing import Any

from uneven.hardware.device import parse_devices
from uneven.hardware.roster import Roster

MEMBERS = ("pc/cpu/a", "pc/cpu/b", "pc/cpu/c")


ROSTER = Roster.on_one_machine(parse_devices("cpu,cpu,cpu"))


def on_thread(action: Callable[[], Any]) -> Callable[[], Any]:
    """Begin it; the returned function waits for its result, or raises its error."""
    found: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(60)
        assert not thread.is_alive(), "it hangs"
        if errors:
            raise errors[0]
        return found[0]

    return result


def await_truth(is_so: Callable[[], bool]) -> None:
    while not is_so():
        time.sleep(0.005)


class FakeGroup:
    """Remembers that it was given up."""

    def __init__(self) -> None:
        self.aborted = threading.Event()
        self.why, self.is_closed = "", False

    def abort(self, why: str) -> None:
        self.why = why
        self.aborted.set()

    def close(self) -> None:
        self.is_closed = True
