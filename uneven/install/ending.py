"""SIGTERM as an exception, for work whose child processes must end with us: used by steps.py and environment.py."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from uneven.errors import Terminated


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """SIGTERM unwinds by Terminated, so that the code within ends its child processes.

    Only the main thread may set handlers of signals: in another one nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: Any) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
