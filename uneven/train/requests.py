"""What is asked of a run from outside: to stop, or to save a checkpoint.

Made by whoever starts a run (launch/run.py, api/fit.py, launch/script.py) and handed down to where it trains: a Worker
in this process, or the watch over rank processes, which passes the requests on through the store
(launch/watch/watch.py).
"""

import signal
import threading

GRACE_S = 30.0  # the setting's default, for a launcher that does not know its script's settings yet


class Requests:
    """Of one run. Any thread may ask; `save` is cleared by whoever takes the request up."""

    def __init__(self, grace: float = GRACE_S) -> None:
        self.stop = threading.Event()
        self.save = threading.Event()
        self.grace = grace  # seconds from a signal until the run must have saved
        self.is_terminated = False  # the stop is a SIGTERM: once the run is saved the process ends with its exit code
        self.is_interrupted = False  # the stop is a Ctrl-C: the run saves where it would not for `Run.stop`

    def terminate(self) -> None:
        """Stop because of a SIGTERM, which reached this process or one of its ranks."""
        self.is_terminated = True
        self.stop.set()

    def interrupt(self) -> None:
        """The stop that follows is a Ctrl-C."""
        self.is_interrupted = True

    def signalled(self, number: int) -> None:
        """Stop because of a SIGTERM or a SIGINT."""
        if number == signal.SIGTERM:
            self.terminate()
        else:
            self.stop.set()

    def rank_signalled(self, number: int) -> None:
        """As `signalled`, by one that a rank process got."""
        self.signalled(number)
