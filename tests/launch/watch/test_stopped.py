"""Which process a heartbeat is of, and whether a signal has stopped it; on a real process."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from uneven.launch.cleanup import process_start
from uneven.launch.watch.peers import is_stopped, process_identity


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def identity(pid: int) -> str:
    machine = process_identity().split(" ")[0]
    return f"{machine} {pid} {process_start(pid)}"


def test_a_process_is_stopped_from_sigstop_to_sigcont(sleeper: "subprocess.Popen[bytes]") -> None:
    name = identity(sleeper.pid)
    assert not is_stopped(name)
    sleeper.send_signal(signal.SIGSTOP)
    os.waitpid(sleeper.pid, os.WUNTRACED)
    assert is_stopped(name)
    sleeper.send_signal(signal.SIGCONT)
    os.waitpid(sleeper.pid, os.WCONTINUED)
    assert not is_stopped(name)


def test_nothing_is_known_of_a_later_process_of_that_number_and_of_other_machines(
    sleeper: "subprocess.Popen[bytes]",
) -> None:
    sleeper.send_signal(signal.SIGSTOP)
    os.waitpid(sleeper.pid, os.WUNTRACED)
    name = identity(sleeper.pid)
    assert not is_stopped(f"{name}0")
    assert not is_stopped(f"elsewhere{name}")
    assert not is_stopped("")
    sleeper.kill()
    sleeper.wait()
    assert not is_stopped(name)


def test_a_process_names_itself() -> None:
    assert process_identity() == identity(os.getpid())
