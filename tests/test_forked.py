"""A forked process is like one that `python` starts, in all that the package and its tests rely on."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import uneven
from tests import forked
from tests.forked import ForkedPopen, run_forked

FACTS = """
import json, os, random, subprocess, sys, threading
import numpy, torch
facts = {
    "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "cwd": os.getcwd(), "argv": sys.argv,
    "cmdline": open("/proc/self/cmdline").read().rstrip(chr(0)).split(chr(0)), "name": __name__, "path": sys.path[:2],
    "variables": [os.environ.get("HERE"), os.environ.get("GONE")], "threads": torch.get_num_threads(),
    "drawn": [random.random(), numpy.random.rand()],
    "forks": subprocess.Popen.__name__, "cores": len(os.sched_getaffinity(0)),
}
print(json.dumps(facts))
"""


@pytest.mark.parametrize("kind", ["-c", "script"])
def test_a_forked_process_has_what_it_was_given(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "facts.py").write_text(FACTS)
    start = ["-c", FACTS] if kind == "-c" else [str(tmp_path / "facts.py")]
    command = [sys.executable, *start, "word"]
    monkeypatch.setenv("GONE", "1")
    env = {"HERE": "1", "OMP_NUM_THREADS": "2", "PYTHONPATH": "/first"}
    first, second = (
        json.loads(run_forked(command, cwd=tmp_path, env=env, start_new_session=True).stdout) for _ in range(2)
    )
    assert forked.the_server().can_fork
    assert first["parent"] == os.getpid()
    assert first["session"] == first["pid"] != second["pid"]
    assert (first["cwd"], first["name"], first["variables"]) == (str(tmp_path), "__main__", ["1", None])
    assert first["argv"] == [start[0], "word"]
    assert first["cmdline"] == command
    assert first["path"] == ["" if kind == "-c" else str(tmp_path), "/first"]
    assert first["threads"] == 2
    assert first["cores"] == len(os.sched_getaffinity(0))
    assert first["forks"] == "PackagePopen"  # what it starts in turn
    assert first["drawn"][0] != second["drawn"][0]
    assert first["drawn"][1] != second["drawn"][1]


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("pass", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('why')", 1, "why\n"),
        ("os._exit(4)", 4, ""),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("raise KeyboardInterrupt", -signal.SIGINT, None),
        ("raise ValueError('wrong')", 1, None),
    ],
)
def test_it_ends_as_python_does(end: str, code: int, words: str | None) -> None:
    program = f"import atexit, os, sys\natexit.register(print, 'last')\nprint('first')\n{end}"
    done = run_forked([sys.executable, "-c", program])
    assert done.returncode == code
    is_orderly = "os." not in end
    assert done.stdout == ("first\nlast\n" if is_orderly else "")
    assert words is None or done.stderr == words
    assert ("ValueError: wrong" in done.stderr) == ("wrong" in end)


def test_a_stopped_or_waiting_process_is_ended_and_reaped() -> None:
    command = [sys.executable, "-c", "import signal; print('here', flush=True); signal.pause()"]
    with ForkedPopen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(100) == -signal.SIGKILL
    assert not psutil.pid_exists(process.pid)


def test_a_server_ends_with_the_process_that_uses_it() -> None:
    children = "[child.pid for child in psutil.Process().children()]"
    program = f"import psutil, signal\nprint(*{children}, flush=True)\nsignal.pause()"
    with ForkedPopen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        (own_server,) = (psutil.Process(int(pid)) for pid in process.stdout.readline().split())
        process.kill()
    psutil.wait_procs([own_server], timeout=100)
    assert not own_server.is_running() or own_server.status() == psutil.STATUS_ZOMBIE


def test_a_command_beside_python_is_forked_too_and_torchruns_workers_with_it(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text("import os, sys\nprint('torch' in sys.modules, sys.argv, os.environ['RANK'])")
    version = run_forked([Path(sys.executable).parent / "uneven", "--version"])
    assert version.stdout == f"uneven {uneven.__version__}\n"
    torchrun = [Path(sys.executable).parent / "torchrun", "--standalone", "--nproc-per-node", "2", "rank.py", "word"]
    done = run_forked(torchrun, cwd=tmp_path)
    assert sorted(done.stdout.splitlines()) == [f"True ['rank.py', 'word'] {rank}" for rank in range(2)], done.stderr


@pytest.mark.real_start
def test_marked_tests_start_processes_for_real() -> None:
    assert subprocess.Popen is forked.RealPopen
    command = [sys.executable, "-c", "import sys; print('torch' in sys.modules)"]
    assert run_forked(command).stdout == "False\n"
