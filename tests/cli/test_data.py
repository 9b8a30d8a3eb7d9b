"""`uneven data`: what it prints, its exit codes, and that Ctrl-C leaves nothing half-written."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests.forked import ForkedPopen, run_forked

MAIN = [sys.executable, "-c", "from uneven.cli.main import main; main()", "data"]


def _environment(folder: Path, proxy: str = "http://127.0.0.1:9") -> dict[str, str]:
    """No network, as a proxy that refuses every connection."""
    others = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return others | {"UNEVEN_DATA": str(folder), "https_proxy": proxy}


def _data(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_forked([*MAIN, *arguments], env=_environment(folder))


def test_list_as_json(tmp_path: Path) -> None:
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "tinyshakespeare.txt").touch()
    done = _data(tmp_path, "list", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["folder"] == str(tmp_path)
    here = {item["name"]: item["here"] for item in document["sets"]}
    assert here == {
        "mnist-mini": True,
        "mnist": False,
        "cifar10": False,
        "shakespeare": True,  # checksums are compared when it is loaded
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


def test_an_unknown_set_exits_with_2_and_one_line(tmp_path: Path) -> None:
    done = _data(tmp_path, "get", "minst")
    assert done.returncode == 2
    assert "choose one of mnist-mini, mnist" in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_a_network_it_exits_with_3_after_its_progress(tmp_path: Path) -> None:
    done = _data(tmp_path / "data", "get", "mnist")
    assert done.returncode == 3
    attempt, failure, _, _, error = done.stderr.splitlines()
    assert attempt == "getting mnist from ossci-datasets.s3.amazonaws.com"
    assert failure == "failed, ossci-datasets.s3.amazonaws.com: Connection refused"
    assert error.startswith("uneven: cannot get mnist: ")
    assert "fix the network" in error
    quiet = _data(tmp_path / "data", "get", "mnist", "--json")
    assert quiet.stderr.splitlines() == [error]


def test_ctrl_c_exits_with_130_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        environment = _environment(folder, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        with ForkedPopen([*MAIN, "get", "mnist"], env=environment) as process:
            proxy.settimeout(60)
            with proxy.accept()[0]:  # it waits for an answer, in the middle of its work
                process.send_signal(signal.SIGINT)
                assert process.wait(60) == 130
    assert [path for path in folder.rglob("*") if path.is_file()] == []
