"""A run over two machines that share no folder: saved while it trains and at SIGTERM, and resumed."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.network.namespaces import ROOT, Machine, needs_namespaces, network
from tests.network.saved_script import BATCH, RANKS, train
from uneven import TrainedState
from uneven.results.checkpoint import read_checkpoint
from uneven.results.checkpoint_folders import find_checkpoints

pytestmark = [needs_namespaces, pytest.mark.soak]
SCRIPT = str(ROOT / "tests" / "network" / "saved_script.py")
TOKEN = {"UNEVEN_TOKEN": "a-token-of-the-tests"}
# The folder of the first machine is an empty one on the second.
APART = 'mount -t tmpfs none "$1" && shift && exec "$@"'


def start(machines: list[Machine], home: Path, pause_s: float) -> list["subprocess.Popen[str]"]:
    first, second = machines
    run = ("-m", "uneven", "run", "--nodes", "2", "--port", "29400", "--devices", "cpu", SCRIPT)
    join = ("-m", "uneven", "join", f"{first.address}:29400", "--wait", "60", "--devices", "cpu")
    python = sys.executable
    return [
        first.python(*run, str(home / "a/run"), str(pause_s), env=TOKEN, cwd=ROOT),
        second.start(
            *("bash", "-c", APART, "_", str(home / "a"), python, *join),
            env={**TOKEN, "TMPDIR": str(home / "b")},
            cwd=ROOT,
        ),
    ]


def test_a_run_on_two_machines_is_saved_stopped_and_goes_on(tmp_path: Path) -> None:
    out, own = tmp_path / "a/run", tmp_path / "b"
    own.mkdir()
    out.parent.mkdir()
    with network(tmp_path, 2) as machines:
        processes = start(machines, tmp_path, pause_s=0.3)
        while not (out / "step-5").is_dir() and all(process.poll() is None for process in processes):
            time.sleep(0.05)
        processes[0].send_signal(signal.SIGTERM)
        said = [process.communicate(timeout=100)[0] for process in processes]
        assert [process.returncode for process in processes] == [143, 143], said
        stopped = read_checkpoint(find_checkpoints(out)[0])
        assert (stopped.record["cause"], len(stopped.ranks)) == ("stop", RANKS), said
        assert [path.name for path in out.iterdir() if path.name.startswith(".")] == [".uneven"], said
        assert list(own.glob("uneven-*")) == []
        processes = start(machines, tmp_path, pause_s=0.0)
        said = [process.communicate(timeout=100)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], said
        assert f"resumes from {stopped.folder}" in said[0]
        assert list(own.glob("uneven-*")) == []
        assert [machine.pids() for machine in machines] == [[], []]
    found, alone = TrainedState.load(out), train(None, devices="cpu", batch_size=BATCH * RANKS, progress="off")
    assert found.finished
    for name, value in alone.params.items():
        torch.testing.assert_close(found.params[name], value, rtol=1e-10, atol=1e-10)
