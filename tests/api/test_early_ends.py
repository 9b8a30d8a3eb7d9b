"""Runs of `uneven run` that end before they are done: by a rank that breaks off, a forgotten sum, Ctrl-C."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.api.starts import BIN, HEAD, start
from tests.forked import ForkedPopen
from uneven import TrainedState

BREAKS = (
    HEAD
    + """
ddp = Ddp.setup(net(), sgd, dataset=TensorData(X, Y), batch_size=8, epochs=2, progress="off")
for x, y in ddp.batches(0):
    if ddp.rank == 1:
        break
    ddp.step(F.cross_entropy(ddp(x), y))
"""
)


@pytest.mark.parametrize("policy", ["balanced", pytest.param("async", marks=pytest.mark.soak)])
def test_a_break_on_one_rank_ends_the_run_with_its_name(tmp_path: Path, policy: str) -> None:
    (tmp_path / "train.py").write_text(BREAKS)
    command = [sys.executable, "-m", "uneven", "run", "train.py", "--devices", "cpu,cpu", "--policy", policy]
    done = start(command, tmp_path)
    assert done.returncode == 1
    assert "rank 0 (cpu" in done.stderr
    assert "rank 1 left its epoch" in done.stderr
    assert 'train.py", line' in done.stderr  # the rank's own traceback


FORGETS = (
    HEAD
    + """
model = net()
wrapped = Ddp.wrap(model)
optimizer = sgd(model.parameters())
for x, y in zip(X.split(10), Y.split(10)):
    optimizer.zero_grad()
    F.cross_entropy(wrapped(x), y).backward()
    optimizer.step()
"""
)


def test_a_forgotten_all_reduce_ends_the_run_instead_of_training_separate_replicas(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FORGETS)
    done = start([BIN / "uneven", "run", "train.py", "--devices", "cpu,cpu"], tmp_path)
    assert done.returncode == 2
    assert "all_reduce_gradients() or weighted_all_reduce_gradients(count)" in done.stderr
    alone = start([sys.executable, "train.py"], tmp_path)
    assert alone.returncode == 0, alone.stderr


WAITS = (
    HEAD
    + """
ddp = Ddp.setup(net(), sgd, dataset=TensorData(X, Y), batch_size=8, epochs=10**6, progress="lines")
for epoch in range(10**6):
    for x, y in ddp.batches(epoch):
        ddp.step(F.cross_entropy(ddp(x), y))
    if epoch == 1 and ddp.rank == 0:  # outside the epoch: a rank that others slow down may have no batch in it
        print("training", flush=True)
"""
)


def test_ctrl_c_stops_all_ranks_after_one_step_and_saves(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WAITS)
    command = [sys.executable, "-m", "uneven", "run", "train.py", "--devices", "cpu,cpu"]
    with ForkedPopen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "training\n"
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=150)
    assert child.returncode == 130, errors
    assert "stopped after" in errors
    (folder,) = (tmp_path / "runs").iterdir()
    state = TrainedState.load(folder)
    assert not state.finished
    assert state.slot > 10
    assert len(json.loads((folder / "log.json").read_text())["ranks"]) == 2
