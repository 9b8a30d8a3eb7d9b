"""Ranks that are lost, started again and join the others, as processes."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from uneven import Callback, TrainedState, fit

KNOWN_S = 1.5
SAMPLES = torch.randn(64, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1).double()


def make_optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch) - batch.sin().sum(1, keepdim=True)).square().mean()


class KillOnce(Callback):
    """Process 1 kills itself; the run stops once process 2, which takes its place, has trained a few steps."""

    def __init__(self, folder: Path) -> None:
        self._marker = folder / "joined"
        self._steps, self._began_s = 0, 0.0

    def on_step(self, info: Any) -> None:
        number = int(sys.argv[2])
        time.sleep(0.005)  # fewer steps until it has joined, for the run by one process to follow
        self._steps, self._began_s = self._steps + 1, self._began_s or time.monotonic()
        # Before its first heartbeats with a step the launcher does not know that the others can go on.
        if number == 1 and time.monotonic() - self._began_s > KNOWN_S:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 2 and self._steps == 3:
            self._marker.touch()
        if number == 0 and self._marker.exists():
            info.stop("enough")


def train(policy: str, folder: Path, **settings: Any) -> TrainedState:
    callbacks = [KillOnce(folder)]
    return fit(
        model=make, optimizer=make_optimizer, step=step, dataset=SAMPLES, batch_size=4, epochs=100_000, seed=3,
        devices="cpu,cpu", policy=policy, restarts=1, callbacks=callbacks, progress="off", **settings,
    )  # fmt: skip


@pytest.mark.soak
def test_a_killed_rank_is_started_again_and_the_run_goes_on_as_by_one_process(tmp_path: Path) -> None:
    state = train("sync", tmp_path)
    assert [len(segment["devices"]) for segment in state.segments] == [2, 1, 2]
    assert state.segments[2]["why"].endswith("joins: 2 ranks go on")
    assert len(state.log) == 3  # two that are there in the end, and the lost one
    assert all(state.log)
    assert sum(state.rank_samples) == state.samples == 8 * state.slot  # each once: a state with gaps is refused
    alone = fit(
        model=make, optimizer=make_optimizer, step=step, dataset=SAMPLES, batch_size=8, epochs=100_000, seed=3,
        devices="cpu", max_steps=state.slot, progress="off",
    )  # fmt: skip
    for name, value in alone.params.items():
        torch.testing.assert_close(state.params[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["balanced", "cadence", "async"])
def test_a_killed_rank_joins_again_in_every_policy(policy: str, tmp_path: Path) -> None:
    state = train(policy, tmp_path)
    assert [len(segment["devices"]) for segment in state.segments] == [2, 1, 2]
    assert sum(state.rank_samples) == state.samples
