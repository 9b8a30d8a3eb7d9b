"""`uneven chaos` on real runs: faults happen, the report tells of them, and Ctrl-C ends the run properly."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cli.documents import check_document
from tests.faults import alive
from tests.forked import ForkedPopen
from uneven import TrainedState

SCRIPT = """
import sys, time, torch
from uneven import TensorData, fit
data = TensorData(torch.randn(64, 4), torch.randn(64, 1))
def step(model, batch):
    time.sleep(0.005)
    return (model(batch[0]) - batch[1]).square().mean()
print("a line of the script", flush=True)
fit(model=lambda: torch.nn.Linear(4, 1), optimizer=lambda p: torch.optim.SGD(p, lr=0.01), step=step, dataset=data,
    batch_size=4, epochs=int(sys.argv[1]), policy="sync")
"""


def start(folder: Path, epochs: int, *options: str) -> "ForkedPopen":
    (folder / "train.py").write_text(SCRIPT)
    line = [sys.executable, "-m", "uneven", "chaos", "train.py", "--devices", "cpu,cpu", *options, "--", str(epochs)]
    return ForkedPopen(line, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.soak
def test_a_run_that_survives_is_reported_as_json_and_its_files_are_not_kept(tmp_path: Path) -> None:
    faults = ("--at", "50ms:pause:0", "--pause-for", "300ms", "--at", "500ms:kill:1", "--at", "501ms:kill:0")
    with start(tmp_path, 120, *faults, "--json") as process:
        out, said = process.communicate(timeout=150)
    assert process.returncode == 0, said
    found = json.loads(out)
    check_document("chaos", found)
    assert [(fault["rank"], fault["kind"]) for fault in found["faults"]] == [(0, "pause"), (1, "kill")]
    assert (found["ranks"], found["exactly_once"], found["samples"]["samples"]) == (2, True, 64 * 120)
    assert found["settled"]["count"] >= 1
    assert [generation["ranks"] for generation in found["generations"]] == [1]
    for line in ("rank 0 is stopped for 0.3 s", "rank 0 goes on", "rank 1 is killed", "rank 0 is the last one"):
        assert line in said
    assert "a line of the script" in said
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.soak
def test_a_rank_that_is_cut_off_ends_alone_and_the_one_in_its_place_is_hit_again(tmp_path: Path) -> None:
    """It took its launcher for dead, ended the others and removed the folder of the run."""
    options = ("--at", "10ms:cut:1", "--at", "4s:kill:1", "--restarts", "1", "--json")
    with start(tmp_path, 400, *options) as process:
        out, said = process.communicate(timeout=150)
    assert process.returncode == 0, said
    found = json.loads(out)
    assert [(fault["rank"], fault["kind"]) for fault in found["faults"]] == [(1, "cut"), (1, "kill")]
    assert found["exactly_once"], said


def test_ctrl_c_wakes_the_paused_saves_and_is_130(tmp_path: Path) -> None:
    options = ("--at", "10ms:pause:1", "--pause-for", "10min", "--out", "run")
    with start(tmp_path, 10**6, *options) as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if "is stopped for" in line:
                break
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        out, rest = process.communicate(timeout=150)
    assert process.returncode == 130, "".join(said) + rest
    assert "stopped after" in out
    assert "1 pause" in out
    psutil.wait_procs(family, timeout=100)
    assert not any(alive(one.pid) for one in family)
    assert not TrainedState.load(tmp_path / "run").finished
