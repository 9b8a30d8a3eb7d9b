"""cadence and async on real processes: every sample once, nothing hangs, replicas bit-equal, whatever happens.

`verify=True` makes the ranks compare checksums of every average and, at the end, of their replicas.
"""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.faults import REHEARSED
from uneven import TensorData, TrainedState, fit

generator = torch.Generator().manual_seed(0)
X = torch.randn(600, 6, generator=generator)
Y = torch.randint(0, 3, (600,), generator=generator)


def train(ranks: int, policy: str, act: Callable[[int, int], None] = lambda *_: None, **changes: Any) -> TrainedState:
    """`act(rank, step)` runs at the start of every step after the warm-up, in the rank."""
    steps = [0]

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        import sys

        steps[0] += 1
        if steps[0] > REHEARSED:
            act(int(sys.argv[2]) if ranks > 1 else 0, steps[0] - REHEARSED)
        return F.cross_entropy(model(batch[0]), batch[1])

    settings: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3)),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        "dataset": TensorData(X, Y),
        "batch_size": 8,
        "epochs": 3,
        "devices": ",".join(["cpu"] * ranks),
        "policy": policy,
        "verify": ranks > 1,
        "progress": "off",
    }
    state = fit(**{**settings, "step": step, **changes})
    assert state.finished
    assert state.samples == 600 * state.config["epochs"]
    return state


def stop_for_two_seconds(rank: int, step: int) -> None:
    if (rank, step) == (1, 20):
        with subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {os.getpid()}"]):
            os.kill(os.getpid(), signal.SIGSTOP)


CASES: dict[str, dict[str, Any]] = {
    "stopped": {"act": stop_for_two_seconds},
    "few slots": {"batch_size": 590, "epochs": 1},  # 2 slots: with 3 ranks one of them gets none
    "long claims": {"epochs": 6, "batch_size": 2},  # steps so short that a claim holds several of them
    "loader": {"dataset": list(zip(X, Y, strict=True)), "num_workers": 1},  # slots are handed out ahead
}


@pytest.mark.parametrize(
    ("case", "ranks", "policy"), [("long claims", 2, "async"), ("few slots", 3, "cadence"), ("loader", 2, "async")]
)
def test_every_sample_once(case: str, ranks: int, policy: str) -> None:
    train(ranks, policy, **{**CASES[case], "epochs": 1})


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", ["cadence", "async"])
@pytest.mark.parametrize("case", CASES)
def test_soak_every_sample_once(case: str, policy: str) -> None:
    """7 runs a case and policy, 56 in all."""
    for ranks in (1, 2, 3, 4, 2, 3, 4):
        train(ranks, policy, **{**CASES[case], **({"act": lambda *_: None} if ranks == 1 else {})})


@pytest.mark.parametrize("policy", ["async", pytest.param("cadence", marks=pytest.mark.soak)])
def test_a_replay_is_bit_equal(policy: str, tmp_path: Path) -> None:
    steps_of_rank_0 = tmp_path / "steps"
    steps_of_rank_0.touch()

    def slow_down(rank: int, step: int) -> None:
        """Rank 1 waits in every step until rank 0 has taken two more, or waits for rank 1 in its turn."""
        import time

        if rank == 0:
            with steps_of_rank_0.open("ab") as file:
                file.write(b".")
            return
        enough, end = steps_of_rank_0.stat().st_size + 2, time.monotonic() + 0.5
        while steps_of_rank_0.stat().st_size < enough and time.monotonic() < end:
            time.sleep(0.001)

    first = train(2, policy, slow_down, out=tmp_path / "run", epochs=2)
    again = train(2, policy, replay=tmp_path / "run", out=tmp_path / "again", epochs=2)
    assert again.log == first.log
    assert again.rounds == first.rounds
    assert len(first.log[1]) < len(first.log[0]), "the slow rank should have trained less"
    for name, value in {**first.params, **first.buffers}.items():
        assert torch.equal({**again.params, **again.buffers}[name], value), name
