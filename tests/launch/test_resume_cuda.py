"""Checkpoints and resume on a CUDA device: snapshots taken while the device trains on, and captured steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from tests.step.graph_runs import assert_same, make_data, train
from uneven import TensorData, TrainedState

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(120)]

PAIR = {"devices": "cuda:0,cuda:0"}
RUNS: dict[str, dict[str, Any]] = {
    "one device": {},
    "one device, captured": {"compile": "graph"},
    "sync": {**PAIR, "policy": "sync", "batch_size": 16},
    "sync, captured": {**PAIR, "policy": "sync", "batch_size": 16, "compile": "graph"},
    "sync over NCCL, captured": {**PAIR, "policy": "sync", "batch_size": 16, "compile": "graph", "backend": "nccl"},
    "cadence": {**PAIR, "policy": "cadence", "anchor": 2, "shares": (2, 1), "batch_size": 8},
    "cadence, captured": {
        **PAIR,
        "policy": "cadence",
        "anchor": 2,
        "shares": (2, 1),
        "batch_size": 8,
        "compile": "graph",
    },
    "a GPU and a CPU": {"devices": "cuda:0,cpu", "policy": "sync", "batch_size": 16},
}


def one_cycle(optimizer: Any, steps: int) -> OneCycleLR:
    """It changes momentum and betas, too."""
    return OneCycleLR(optimizer, max_lr=1 / 16, total_steps=steps + 1)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_ends_as_an_uninterrupted_one(name: str, optimizer: str, tmp_path: Path) -> None:
    options = {"compile": "off", "save_every": "4 steps", "epochs": 4, "keep_last": 100, **RUNS[name]}
    whole = train(optimizer=optimizer, out=str(tmp_path / "whole"), **options)
    (checkpoint, *_) = sorted((tmp_path / "whole").glob("step-*"), key=lambda path: int(path.name[5:]))
    resumed = train(optimizer=optimizer, out=str(tmp_path / "resumed"), resume=str(checkpoint), **options)
    assert resumed.finished
    assert_same(whole, resumed, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_a_captured_step_follows_what_a_scheduler_changes_beside_the_rate(optimizer: str) -> None:
    """Momentum and betas are numbers in the captured kernels: OneCycleLR must not be frozen at the first ones."""
    captured, eager = (train(compile, optimizer, scheduler=one_cycle) for compile in ("graph", "off"))
    assert_same(captured, eager, rtol=1e-2, atol=1e-5)


def poisoned() -> TensorData:
    """Two samples whose loss is not a number."""
    data = make_data()
    data.tensors[0][[7, 120]] = float("nan")
    return data


def without_batchnorm() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 2)).double()


@pytest.mark.parametrize("compile", ["off", "graph"])
@pytest.mark.parametrize("devices", ["cuda:0", "cuda:0,cuda:0", "cuda:0,cpu"])
def test_steps_that_are_not_finite_leave_no_trace(compile: str, devices: str) -> None:
    if compile == "graph" and "cpu" in devices:
        pytest.skip("a CPU rank has no CUDA graph")
    count = len(devices.split(","))
    options: dict[str, Any] = {"dataset": poisoned(), "model": without_batchnorm}
    ours = train(compile, devices=devices, batch_size=32 // count, policy="sync", **options)
    plain = train("off", devices="cpu", **options)
    assert ours.dropped
    assert_params(ours, plain)


def assert_params(ours: TrainedState, plain: TrainedState) -> None:
    for name, value in ours.params.items():
        assert value.isfinite().all(), name
        torch.testing.assert_close(value, plain.params[name], rtol=1e-7, atol=1e-8)


def test_a_dataloader_of_the_users_feeds_pinned_batches() -> None:
    from torch.utils.data import DataLoader, TensorDataset

    x, y = make_data().tensors
    loader = DataLoader(TensorDataset(2 * x, y), batch_size=32, shuffle=False, num_workers=2, pin_memory=True)
    ours = train("off", dataset=loader)
    plain = train("off", dataset=loader, devices="cpu")
    assert_params(ours, plain)


def test_a_checkpoint_of_a_large_model_is_that_of_its_slot(tmp_path: Path) -> None:
    """The copies to the host are still under way when the next steps are enqueued."""

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(10, 2048), nn.Tanh(), nn.Linear(2048, 2048), nn.Tanh(), nn.Linear(2048, 2)
        ).double()

    options: dict[str, Any] = {"model": model, "epochs": 3, "save_every": "5 steps", "keep_last": 100}
    whole = train("graph", out=str(tmp_path / "a"), **options)
    resumed = train("graph", out=str(tmp_path / "b"), resume=str(tmp_path / "a" / "step-10"), **options)
    assert_same(whole, resumed, rtol=1e-12, atol=1e-12)
