"""Processes that are started without standard streams."""

import os
import subprocess
import sys

from uneven.launch.standard_streams import open_closed_streams

PROGRAM = """
import os, sys
from uneven.launch.standard_streams import open_closed_streams
open_closed_streams()
print("out"), print("err", file=sys.stderr), sys.stdout.flush(), sys.stderr.isatty()
assert all(os.fstat(number).st_rdev == os.stat("/dev/null").st_rdev for number in range(3))
"""


def test_streams_that_are_closed_become_dev_null() -> None:
    """Runs of a daemon, or with 2>&-, ended without a word: sys.stderr is None there."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, stdin=-1, preexec_fn=lambda: os.closerange(0, 3), timeout=100)
    assert done.returncode == 0


def test_streams_that_are_open_stay_what_they_are() -> None:
    before = [os.fstat(number).st_ino for number in range(3)], sys.stdin, sys.stdout, sys.stderr
    open_closed_streams()
    assert before == ([os.fstat(number).st_ino for number in range(3)], sys.stdin, sys.stdout, sys.stderr)
