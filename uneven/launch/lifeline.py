"""A process that ends with the one that started it, however that one ended.

For `uneven ...` started as a child of a benchmark: the parent holds the other end of the child's stdin and writes
nothing. Without it the run of a killed sweep would go on beside the same run of the next sweep; held by
tests/bench/single/test_process.py. Ranks of a run watch their launcher, see cleanup.py.
"""

import os
import signal
import threading

LIFELINE = "UNEVEN_ENDS_WITH_STDIN"  # set by the parent in the child's environment


def end_with_parent() -> None:
    """Called first in the child; does nothing in a process that was started in another way."""
    if os.environ.pop(LIFELINE, None) is not None:
        threading.Thread(target=_end_after_stdin, daemon=True).start()


def _end_after_stdin() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)  # at once: a SIGTERM would save first; ranks see that their launcher is gone
