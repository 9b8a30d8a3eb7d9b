import os
import sys
from pathlib import Path

import psutil
import pytest

from tests.forked import ForkedPopen
from uneven.bench.single.process import Ended, flags, run_uneven


def test_settings_become_options() -> None:
    assert flags({"batch_size": 8, "data": None, "out": "runs"}) == ["--batch-size", "8", "--out", "runs"]


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        ("Traceback ...\nuneven: rank 1 was killed\nsome library's farewell\n", "rank 1 was killed"),
        ("Traceback ...\nKeyError: 'x'\n\n", "KeyError: 'x'"),
        ("", "ended with exit code 9 and no message"),
    ],
)
def test_the_message_is_our_own_line_if_there_is_one(stderr: str, words: str) -> None:
    assert Ended(9, "", stderr).message == words


def test_a_command_runs_in_a_process_of_its_own_on_the_cores_given() -> None:
    ended = run_uneven(["--version"], sorted(os.sched_getaffinity(0))[:1])
    assert ended.code == 0
    assert ended.stdout.startswith("uneven ")
    assert run_uneven(["bench", "report", "nowhere"]).message.startswith("there is no folder nowhere")


def test_a_run_ends_when_whoever_started_it_is_killed(tmp_path: Path) -> None:
    """The run of a sweep that was killed must not go on beside the next sweep."""
    pid_file = tmp_path / "pid"
    os.mkfifo(pid_file)
    script = tmp_path / "endless.py"
    script.write_text(f"import os, time\nprint(os.getpid(), file=open({str(pid_file)!r}, 'w'))\ntime.sleep(300)\n")
    words = ["run", str(script), "--devices", "cpu"]
    command = f"from uneven.bench.single.process import *; run_uneven({words!r})"
    starter = ForkedPopen([sys.executable, "-c", command])
    rank = psutil.Process(int(pid_file.read_text()))
    starter.kill()
    starter.wait()
    psutil.wait_procs([rank], timeout=150)
    assert not rank.is_running()
