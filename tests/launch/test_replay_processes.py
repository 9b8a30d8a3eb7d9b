"""Runs of processes, one of which was killed and started again, are replayed bit by bit: with random numbers of their
own in every rank, over the real transports.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from uneven import Callback, InputError, TrainedState, fit

KNOWN_S = 1.5
STEPS = 400
X = torch.randn(160, 6, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(nn.functional.dropout(torch.tanh(self.norm(self.first(x))), 0.3, self.training))


def make_optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch) - batch.sin().sum(1, keepdim=True)).square().mean()


def accuracy(model: nn.Module, batch: Any) -> tuple[dict[str, torch.Tensor], int]:
    return {"level": model(batch).sum().double()}, len(batch)


class Kill(Callback):
    """Process 1 kills itself; the others slow down until the process that takes its place trains, if there is one."""

    def __init__(self, folder: Path, restarts: int) -> None:
        self._marker, self._restarts = folder / "joined", restarts
        self._steps, self._began_s = 0, 0.0

    def on_step(self, info: Any) -> None:
        number = int(sys.argv[2])
        self._steps, self._began_s = self._steps + 1, self._began_s or time.monotonic()
        # Before its first heartbeats with a step the launcher does not know that the others can go on.
        if number == 1 and time.monotonic() - self._began_s > KNOWN_S:
            os.kill(os.getpid(), signal.SIGKILL)
        if number > 2:
            self._marker.touch()
        if time.monotonic() - self._began_s < KNOWN_S or (self._restarts and not self._marker.exists()):
            time.sleep(0.01 if info.step < STEPS // 2 else 0.5)


def train(policy: str, epochs: int, **settings: Any) -> TrainedState:
    settings = {"devices": "cpu,cpu,cpu", **settings}
    return fit(
        model=Net, optimizer=make_optimizer, step=step, dataset=X, evaluate=(X, accuracy), eval_every="2 epochs",
        batch_size=4, epochs=epochs, seed=3, policy=policy, progress="off", **settings,
    )  # fmt: skip


def kill_and_replay(policy: str, restarts: int, folder: Path) -> None:
    epochs = STEPS // (-(-len(X) // 12) if policy in ("sync", "balanced") else len(X) // 4)
    first = train(policy, epochs, out=folder / "run", restarts=restarts, callbacks=[Kill(folder, restarts)])
    assert [len(segment["devices"]) for segment in first.segments] == [3, 2, 3][: 2 + restarts]
    again = train(policy, epochs, replay=folder / "run", out=folder / "again")
    assert (again.log, again.rounds, again.members) == (first.log, first.rounds, first.members)
    for kind in ("params", "buffers", "optimizer"):
        for name, value in getattr(first, kind).items():
            assert torch.equal(getattr(again, kind)[name], value), (kind, name)
    third = train(policy, epochs, replay=folder / "again")  # what a replay leaves is a log as good
    assert all(torch.equal(third.params[name], value) for name, value in first.params.items())
    with pytest.raises(InputError, match="that run had at most so many devices at once: 3, this one 2; name 3 devices"):
        train(policy, epochs, devices="cpu,cpu", replay=folder / "run")


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("policy", ["sync", "balanced", "cadence", "async"])
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_run_with_a_killed_rank_is_replayed(policy: str, restarts: int, tmp_path: Path) -> None:
    kill_and_replay(policy, restarts, tmp_path)
