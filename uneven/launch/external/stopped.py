"""Whether a process that another one has started was stopped by a signal (SIGSTOP), so that it sends no heartbeats.

Under torchrun each heartbeat says which process it is of, and rank 0 asks about it (launch/external/peers.py); a
launcher knows its own processes. Of a process on another machine, or in another container, nothing is known.
"""

import os
from functools import cache
from pathlib import Path

from uneven.hardware.optional import read_text
from uneven.launch.cleanup import pid_namespace, process_start, process_state

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def process_identity() -> str:
    """This process, for others of the machine: its pid, and what makes it a name for ever."""
    return f"{_machine()} {os.getpid()} {_own_start(os.getpid())}"


def is_stopped(identity: str) -> bool:
    machine, _, process = identity.partition(" ")
    pid, _, start = process.partition(" ")
    if machine != _machine() or not pid.isdecimal() or process_start(int(pid)) != start:
        return False
    return process_state(int(pid)) == "T"


@cache
def _machine() -> str:
    """Equal for processes that have the same pids."""
    return f"{(read_text(BOOT_ID) or '').strip()}/{pid_namespace()}"


@cache
def _own_start(pid: int) -> str | None:
    return process_start(pid)
