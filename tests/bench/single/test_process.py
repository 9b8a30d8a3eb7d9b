import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.forked import ForkedPopen
from uneven.bench.single.process import Ended, flags, run_many, run_uneven


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


def test_several_commands_run_at_once_and_the_next_starts_when_one_has_ended(tmp_path: Path) -> None:
    """Each of the first two waits for the other, so they end only if both run; the third is read after them."""
    pipes = [tmp_path / "a", tmp_path / "b"]
    for pipe in pipes:
        os.mkfifo(pipe)
    meet = "import sys\nopen(sys.argv[1], 'w').close() if sys.argv[3] == 'a' else open(sys.argv[1]).close()\n"
    meet += "open(sys.argv[2]).close() if sys.argv[3] == 'a' else open(sys.argv[2], 'w').close()\nprint(sys.argv[3])"
    script = tmp_path / "meet.py"
    script.write_text(meet)
    started: list[str] = []

    def commands() -> Iterator[list[str]]:
        for name in "ab":
            started.append(name)
            yield ["run", "--devices", "cpu", str(script), *map(str, pipes), name]
        started.append("version")
        yield ["--version"]

    found = {}
    for position, ended in run_many(commands(), 2):
        found[position] = ended
        assert len(started) == 2 or len(found) > 1
    assert [found[position].code for position in range(3)] == [0, 0, 0]
    assert [found[position].stdout.strip()[:6] for position in range(3)] == ["a", "b", "uneven"]


def test_an_interrupted_command_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uneven.bench.single.process.END_S", 0.1)  # for one that does not hear of it
    pids = tmp_path / "pids"
    os.mkfifo(pids)
    endless = tmp_path / "endless.py"
    endless.write_text(f"import os, time\nprint(os.getpid(), file=open({str(pids)!r}, 'w'))\ntime.sleep(300)\n")
    stopped = tmp_path / "stopped.py"
    stopped.write_text("import os, signal, time\nos.kill(os.getppid(), signal.SIGINT)\ntime.sleep(300)\n")
    commands = [["run", "--devices", "cpu", str(endless)]]
    ranks: list[psutil.Process] = []

    def both() -> Iterator[list[str]]:
        yield commands[0]
        ranks.append(psutil.Process(int(pids.read_text())))
        yield ["run", "--devices", "cpu", str(stopped)]

    with pytest.raises(KeyboardInterrupt):
        list(run_many(both(), 2))
    psutil.wait_procs(ranks, timeout=150)
    assert not ranks[0].is_running()


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
