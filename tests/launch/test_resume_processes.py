"""Checkpoints of runs in rank processes: a disk that is full for a while, intervals of time, and by request."""

import resource
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.faults import REHEARSED
from uneven import Ddp, TensorData, TrainedState
from uneven.data.sample_order import prove_exactly_once
from uneven.launch.run import Run
from uneven.policy.axis import Axis
from uneven.results.checkpoint import read_checkpoint
from uneven.results.checkpoint_folders import find_checkpoints

torch.manual_seed(0)
DATA = TensorData(torch.randn(64, 4), torch.randn(64, 1))  # 8 slots an epoch


def make() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.Linear(16, 1))


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def start(out: Path, step: Any, **changes: Any) -> Run:
    settings: dict[str, Any] = {"progress": "off", "batch_size": 8, **changes}
    return Ddp.builder(make, adam, step).dataset(DATA).settings(out=out, **settings).run()


def train(out: Path, step: Any = loss, **changes: Any) -> TrainedState:
    return start(out, step, **changes).join()


def test_a_full_disk_costs_the_checkpoint_and_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank's writes fail in their middle, then there is space again."""
    out, steps = tmp_path / "run", [0]

    def wait_for(pattern: str) -> None:
        end = time.monotonic() + 60
        while not list(out.glob(pattern)) and time.monotonic() < end:
            time.sleep(0.005)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        import sys

        steps[0] += 1
        if sys.argv[2] == "1" and steps[0] == REHEARSED + 4:  # the checkpoint at slot 3 is being written
            wait_for("step-3")
            resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
        if sys.argv[2] == "1" and steps[0] == REHEARSED + 8:
            wait_for(".step-6.failed-*")
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return loss(model, batch)

    options: dict[str, Any] = {"batch_size": 4, "epochs": 2, "devices": "cpu,cpu", "policy": "sync"}
    state = train(out, step, save_every="3 steps", progress="lines", **options)
    assert state.finished
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "is not saved" in line)
    assert f"checkpoint {out / 'step-6'} is not saved: File too large" in line
    assert "on rank 1; it needs about" in line
    assert " MB are free in " in line
    assert line.endswith(f"training is not affected, the last whole checkpoint is {out / 'step-3'}")
    assert {path.name for path in out.glob("*step*")} == {"step-3", "step-9", "step-12", "step-15", "step-16"}
    for folder in find_checkpoints(out):
        read_checkpoint(folder)
    assert not list(out.glob(".step-*"))
    again = train(tmp_path / "b", resume=out / "step-9", **options)
    assert all(torch.equal(again.params[name], value) for name, value in state.params.items())


def causes(out: Path) -> list[str]:
    return [read_checkpoint(folder).record["cause"] for folder in find_checkpoints(out)]


def test_saves_by_time_and_by_request_are_in_the_log_which_repeats_the_run(tmp_path: Path) -> None:
    """The caller asks from its own thread; rank 0's clock decides on intervals."""
    options = {"devices": "cpu,cpu", "policy": "async", "anchor": 2, "epochs": 40}
    out, seen = tmp_path / "run", tmp_path / "seen"

    def slow(model: nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(0.0 if seen.exists() else 0.02)
        return loss(model, batch)

    run = start(out, slow, save_every="0.1 s", **options)
    entries = run.metrics()
    next(entries)
    run.checkpoint()
    while {"request", "interval"} != set(causes(out)) and not (out / "state.json").exists():
        time.sleep(0.02)
    seen.touch()
    for _ in entries:
        pass
    state = run.join()
    axis = Axis(64, 8, 40)
    assert prove_exactly_once(axis, state.log, axis.total) == axis.total
    assert {"request", "interval"} == set(causes(out))
    assert sorted(int(folder.name.removeprefix("step-")) for folder in find_checkpoints(out)) == state.saves
    assert not list(out.glob(".step-*"))
    again = train(tmp_path / "again", replay=out, **options)
    assert again.log == state.log
    for name, value in state.params.items():
        assert torch.equal(again.params[name], value), name


def test_a_caller_asks_for_a_checkpoint_of_a_run_in_its_own_process(tmp_path: Path) -> None:
    asked, seen = threading.Event(), threading.Event()

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.set()
        asked.wait(60)
        return loss(model, batch)

    run = start(tmp_path / "run", step, devices="cpu", epochs=2)
    seen.wait(60)
    run.checkpoint()
    asked.set()
    state = run.join()
    (slot,) = state.saves
    assert causes(tmp_path / "run") == ["request"]
    resumed = train(tmp_path / "again", devices="cpu", epochs=2, resume=tmp_path / "run" / f"step-{slot}")
    assert all(torch.equal(resumed.params[name], value) for name, value in state.params.items())
