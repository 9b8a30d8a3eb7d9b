"""`uneven run --nodes` and `uneven join` as processes, two machines that are one: addresses of loopback."""

import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.forked import RealPopen
from uneven.errors import InputError
from uneven.launch.cleanup import SHARED_MEMORY, pid_namespace
from uneven.launch.control.known_runs import ended_runs
from uneven.machines.hosts import Host, StartedHosts

TOKEN = "a-token-of-the-tests"
SCRIPT = """
import torch
from helper import samples
from uneven import fit

state = fit(
    model=lambda: torch.nn.Linear(4, 1), optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    step=lambda model, batch: model(batch).square().mean(), dataset=samples(), batch_size=4, epochs=2,
)
print("rank samples", sum(state.rank_samples))
"""
HELPER = "import torch\n\n\ndef samples():\n    return list(torch.ones(16, 4))\n"
SSH = """#!/bin/sh
# In the place of ssh: the last word is the command, and the machine is this one.
for word in "$@"; do last="$word"; done
exec sh -c "$last"
"""


def start(folder: Path, *args: str, env: dict[str, str] | None = None) -> "subprocess.Popen[str]":
    variables = os.environ | {"UNEVEN_TOKEN": TOKEN, "PYTHONUNBUFFERED": "1"} | (env or {})
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "uneven", *args]
    # Started for real: neither loads torch until the machines fit, and a fork would have it loaded.
    return RealPopen(command, cwd=folder, env=variables, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def lead(folder: Path, *args: str, nodes: str = "2", script: str = "train.py") -> tuple["subprocess.Popen[str]", str]:
    """The leader, and ADDRESS:PORT from the line that it prints."""
    leader = start(folder, "run", script, "--nodes", nodes, "--bind", "127.0.0.1", "--devices", "cpu", *args)
    assert leader.stdout is not None
    for line in leader.stdout:
        if "uneven join" in line:
            return leader, line.split()[2]
    raise AssertionError("the leader has ended")


def ends(processes: Sequence["subprocess.Popen[str]"]) -> list[tuple[int, str]]:
    outputs = [process.communicate(timeout=90)[0] for process in processes]
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        (folder / "train.py").write_text(SCRIPT)
        (folder / "helper.py").write_text(HELPER)
    return first, second


def test_a_wrong_token_and_a_differing_helper_are_refused_in_words(folders: tuple[Path, Path]) -> None:
    """One leader: a wrong token ends nothing but its own process, a differing file ends the run on both sides."""
    first, second = folders
    (second / "helper.py").write_text(HELPER.replace("16", "32"))
    leader, place = lead(first)
    ((code, output),) = ends([start(second, "join", place, env={"UNEVEN_TOKEN": "a-wrong-token"})])
    assert code == 1
    assert "wrong token; take the line that the leader printed" in output
    with subprocess.Popen(["true"]) as dead:
        pass
    left = second / "tmp" / f"uneven-{pid_namespace()}-{dead.pid}-x"  # as of a rank that was killed
    left.mkdir(parents=True)
    node = start(second, "join", place, env={"TMPDIR": str(left.parent)})
    (code, output), (node_code, node_output) = ends([leader, node])
    assert (code, node_code) == (1, 1)
    assert not left.exists(), "parts of checkpoints of its ranks"
    assert "127.0.0.1 was refused: wrong token" in output
    for text in (output, node_output):
        assert "helper.py differs; copy the leader's there (git, rsync)" in text
        assert TOKEN not in text
        assert "Traceback" not in text


def test_sigterm_while_machines_are_waited_for_leaves_nothing_and_tells_the_others(folders: tuple[Path, Path]) -> None:
    """Folders stayed in shared memory, and the other machine said that the leader was lost."""
    first, second = folders
    leader, place = lead(first, nodes="3")
    assert leader.stdout is not None
    nodes = []
    for left in (1, 0):
        nodes.append(start(second, "join", place, "--devices", "cpu"))
        assert any("has joined" in line for line in leader.stdout), "the leader has ended"
        if left:
            nodes[0].terminate()
            assert any("has left again" in line for line in leader.stdout), "the leader has ended"
    leader.terminate()
    (code, output), (gone_code, _), (node_code, node_output) = ends([leader, *nodes])
    assert (code, gone_code, node_code) == (143, 143, 143), (output, node_output)
    assert "stopped by SIGTERM" in node_output
    for process in (leader, *nodes):
        assert not list(SHARED_MEMORY.glob(f"uneven-*-{process.pid}-*"))
    assert [run["result"] for run in ended_runs() if run["pid"] == leader.pid] == ["stopped"]


@pytest.fixture
def ssh(tmp_path: Path) -> Path:
    path = tmp_path / "ssh"
    path.write_text(SSH)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_hosts_get_the_token_on_stdin_and_their_lines_have_a_name(ssh: Path, tmp_path: Path) -> None:
    """`python` is a script that shows what it was given."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nread token\necho "args $*"\necho "token $token"\nexit 7\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    lines: list[str] = []
    hosts = [Host("192.0.2.11", devices="cpu", python=str(python)), Host("box", python=str(python))]
    started = StartedHosts(hosts, "192.0.2.10:7000", TOKEN, str(ssh), lines.append)
    started.end(60.0)
    args = "args -m uneven join 192.0.2.10:7000 --token-file -"
    assert sorted(lines) == [
        f"[192.0.2.11] {args} --devices cpu",
        f"[192.0.2.11] token {TOKEN}",
        f"[box] {args}",
        f"[box] token {TOKEN}",
    ]
    assert "192.0.2.11: 'uneven join' over ssh ended with exit code 7: token" in str(started.failure())
    with pytest.raises(InputError, match="--ssh /no/such/ssh: cannot be started"):
        StartedHosts(hosts, "192.0.2.10:7000", TOKEN, "/no/such/ssh", lines.append)


@pytest.mark.soak
def test_hosts_are_started(folders: tuple[Path, Path], ssh: Path, tmp_path: Path) -> None:
    """Over a program in the place of ssh; the token is in no command line."""
    first, second = folders
    hosts = tmp_path / "hosts.toml"
    hosts.write_text(
        f'[[hosts]]\naddress = "box"\ndevices = "cpu,cpu"\nfolder = "{second}"\npython = "{sys.executable}"\n'
    )
    command = ("run", "train.py", "--hosts", str(hosts), "--bind", "127.0.0.1", "--devices", "cpu")
    ((code, output),) = ends([start(first, *command, "--ssh", str(ssh))])
    assert code == 0, output
    assert "[box] uneven: rank 1 (cpu), 2 (cpu) of 3 start here" in output
    assert output.count("rank samples 32") == 3
    assert output.count("[box] rank samples 32") == 2
    assert TOKEN not in output


@pytest.fixture
def packages(tmp_path: Path) -> tuple[Path, Path]:
    """The script as a module of a package; on the second machine another one of it differs."""
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        (folder / "shop").mkdir(parents=True)
        (folder / "shop" / "__init__.py").write_text("")
        (folder / "shop" / "train.py").write_text(SCRIPT.replace("from helper", "from .helper"))
        (folder / "shop" / "helper.py").write_text(HELPER)
    (second / "shop" / "helper.py").write_text(HELPER.replace("16", "32"))
    return first, second


def test_the_package_of_a_module_is_compared(packages: tuple[Path, Path]) -> None:
    first, second = packages
    leader, place = lead(first, "-m", script="shop.train")
    for code, output in ends([leader, start(second, "join", place)]):
        assert code == 1
        assert "shop/helper.py differs; copy the leader's there" in output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("run", "train.py", "--nodes", "0"), "--nodes 0 must be a number of machines"),
        (("run", "train.py", "--nodes", "4-2"), "--nodes 4-2 must be"),
        (("join", "127.0.0.1:9"), "joining needs the leader's token"),
        (("join", "127.0.0.1", "--token", "long-enough"), "ADDRESS:PORT"),
    ],
)
def test_bad_input_ends_with_two(folders: tuple[Path, Path], args: tuple[str, ...], message: str) -> None:
    from typer.testing import CliRunner

    from uneven.cli.main import app

    result = CliRunner().invoke(app, list(args), env={"UNEVEN_TOKEN": None})
    assert getattr(result.exception, "exit_code", None) == 2
    assert message in str(result.exception)
    del folders


STOPS_ITSELF = """
import os, signal, time, torch
from uneven import fit

class Stops:
    def on_step(self, info):
        if info.rank == 1 and info.step > 2:
            time.sleep(1)  # five heartbeats, which say whose code this is
            os.kill(os.getpid(), signal.SIGSTOP)

state = fit(
    model=lambda: torch.nn.Linear(4, 1), optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    step=lambda model, batch: model(batch).square().mean(), dataset=list(torch.ones(64, 4)), batch_size=4, epochs=6,
    policy="async", deadline=4, callbacks=[Stops()],
)
print("samples", state.samples, state.finished)
"""


@pytest.mark.soak
def test_a_rank_of_another_machine_that_is_stopped_in_a_callback_is_missed(folders: tuple[Path, Path]) -> None:
    """The others waited for ever: its launcher knows the process, and the leader does not."""
    for folder in folders:
        (folder / "train.py").write_text(STOPS_ITSELF)
    first, second = folders
    leader, place = lead(first)
    (code, output), (_, node_output) = ends([leader, start(second, "join", place, "--devices", "cpu")])
    assert code == 0, (output, node_output)
    assert "fell silent" in output
    assert "samples 384 True" in output
