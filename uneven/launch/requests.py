"""What is asked of a run from outside: to stop, or to save a checkpoint.

Made by whoever starts a run (launch/run.py, api/fit.py, launch/script.py) and handed down to where it trains: a Worker
in this process, or the watch over rank processes, which passes the requests on through the store (launch/watch.py).
"""

import threading


class Requests:
    """Of one run. Any thread may ask; `save` is cleared by whoever takes the request up."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.save = threading.Event()
        self.is_terminated = False  # the stop is a SIGTERM: once the run is saved the process ends with its exit code

    def terminate(self) -> None:
        """Stop because of a SIGTERM, which reached this process or one of its ranks."""
        self.is_terminated = True
        self.stop.set()
