"""A healthy rank that holds Python's lock for 10 s sends no heartbeat meanwhile, and is not dropped."""

import ctypes
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from uneven import Callback, fit

HELD_S = 10


class HoldsLock:
    """A train step. Process 1 holds the lock once, in training: as in a long call of an extension."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        begun, held = self._folder / "begun", self._folder / "held"
        if sys.argv[2:3] == ["1"] and begun.exists() and not held.exists():
            held.touch()
            ctypes.PyDLL(None).sleep(HELD_S)
        return (model(batch) - batch.sin().sum(1, keepdim=True)).square().mean()


class Begins(Callback):
    """Says that process 1 trains: the step is called to measure its speed before."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_step(self, info: Any) -> None:
        del info
        if sys.argv[2:3] == ["1"]:
            (self._folder / "begun").touch()


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["sync", "async"])
def test_a_rank_that_holds_the_lock_for_10_s_stays(tmp_path: Path, policy: str) -> None:
    state = fit(
        model=lambda: nn.Linear(4, 1), optimizer=lambda p: torch.optim.SGD(p, lr=0.05), step=HoldsLock(tmp_path),
        dataset=torch.randn(64, 4, generator=torch.Generator().manual_seed(1)), batch_size=4, epochs=40, seed=3,
        devices="cpu,cpu", policy=policy, callbacks=[Begins(tmp_path)], progress="off",
    )  # fmt: skip
    assert (tmp_path / "held").exists()
    assert state.finished
    assert len(state.segments) == 1, state.segments  # one generation, of both
    assert len(state.log) == 2
