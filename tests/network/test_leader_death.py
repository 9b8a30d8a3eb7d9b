"""The leader's machine dies: the others end with one line, and one of them goes on from its copy of the checkpoint."""

import os
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
# The folder of the first machine is another one on the second.
APART = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
ENDED_S = 10.0


def on_second(second: Machine, home: Path, *args: str) -> "subprocess.Popen[str]":
    command = (sys.executable, "-m", "uneven", *args)
    return second.start("bash", "-c", APART, "_", str(home / "b"), str(home / "a"), *command, env=TOKEN, cwd=ROOT)


def start(machines: list[Machine], home: Path, pause_s: float) -> list["subprocess.Popen[str]"]:
    first, second = machines
    lead = ("run", "--nodes", "2", "--port", "29400", "--devices", "cpu", "--checkpoint-copies", "2", SCRIPT)
    return [
        first.python("-m", "uneven", *lead, str(home / "a/run"), str(pause_s), env=TOKEN, cwd=ROOT),
        on_second(second, home, "join", f"{first.address}:29400", "--wait", "60", "--devices", "cpu"),
    ]


def await_copy(folder: Path, processes: list["subprocess.Popen[str]"]) -> None:
    while not folder.is_dir() and all(process.poll() is None for process in processes):
        time.sleep(0.05)


@pytest.mark.parametrize("how", ["killed", "unplugged"])
def test_the_others_end_and_one_goes_on_from_its_copy(how: str, tmp_path: Path) -> None:
    out, copies = tmp_path / "a/run", tmp_path / "b/run"
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with network(tmp_path, 2) as machines:
        processes = start(machines, tmp_path, pause_s=0.2)
        await_copy(copies / "step-10", processes)
        if how == "killed":
            for pid in machines[0].pids():
                os.kill(pid, signal.SIGKILL)
        else:
            machines[0].pull_cable()
        died_s = time.monotonic()
        said = processes[1].communicate(timeout=60)[0]
        took_s = time.monotonic() - died_s
        assert processes[1].returncode == 1, said
        assert took_s < ENDED_S, said  # what the user is promised
        last = said.strip().splitlines()[-1]
        assert f"the leader at {machines[0].address}:29400 is lost" in last, said
        assert "Traceback" not in said
        assert machines[1].pids() == []
        for pid in machines[0].pids():
            os.kill(pid, signal.SIGKILL)
        processes[0].communicate(timeout=60)
        newest = [read_checkpoint(find_checkpoints(folder)[0]) for folder in (out, copies)]
        assert newest[0].record["slot"] >= newest[1].record["slot"] >= 10
        assert len(newest[1].ranks) == RANKS
        assert len(find_checkpoints(copies)) <= 2  # pruned as on the leader
        assert [path.name for path in copies.iterdir() if path.name.startswith(".")] == [".uneven"], said
        # Whoever is there goes on: the second machine alone, from its own folder.
        alone = on_second(machines[1], tmp_path, "run", "--resume", str(out), "--devices", "cpu", SCRIPT, str(out), "0")
        said = alone.communicate(timeout=200)[0]
        assert alone.returncode == 0, said
        assert f"resumes from {out}/step-" in said
    state = TrainedState.load(copies)
    expected = train(None, devices="cpu", batch_size=BATCH * RANKS, progress="off")
    assert state.finished
    assert state.samples == expected.samples
    for name, value in expected.params.items():
        torch.testing.assert_close(state.params[name], value, rtol=0, atol=1e-10)
