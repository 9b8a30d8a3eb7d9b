"""A rank process with shards that nobody has a copy of is killed: the others go back to a checkpoint by themselves."""

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from uneven import Callback, RankError, TensorData, TrainedState, fit

GENERATOR = torch.Generator().manual_seed(2)
X, Y = torch.randn(96, 4, generator=GENERATOR).double(), torch.randn(96, 1, generator=GENERATOR).double()


def make() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


class Kill(Callback):
    """Process 2 kills itself so many steps after the checkpoint of a step was written, and waits for it before."""

    def __init__(self, saved: int | None, at: int) -> None:
        self._saved, self._at = saved, at
        self._is_saved = saved is None

    def on_save(self, info: Any) -> None:
        self._is_saved |= info.step == self._saved

    def on_step(self, info: Any) -> None:
        if self._is_saved and info.step >= self._at and int(sys.argv[2]) == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def train(**settings: Any) -> TrainedState:
    return fit(
        model=make, optimizer=adam, step=step, dataset=TensorData(X, Y), epochs=2, seed=5, global_batch_size=12,
        batch_size=12, **settings,
    )  # fmt: skip


def train_killed(out: Path, name: str, saved: int | None, at: int, **settings: Any) -> TrainedState:
    more = {"strategy": name, "policy": "balanced", "out": out, "callbacks": [Kill(saved, at)], "progress": "lines"}
    return train(devices="cpu,cpu@0.8,cpu", **more, **settings)


@pytest.mark.parametrize("name", ["zero2", *(pytest.param(one, marks=pytest.mark.soak) for one in ("zero1", "fsdp"))])
def test_the_others_go_back_to_the_checkpoint(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = train_killed(tmp_path / "out", name, saved=8, at=11, save_every="4 steps")
    said = "".join(capsys.readouterr())
    assert re.search(r"rank 2 \(cpu on \S+\) was ended by SIGKILL: 2 ranks go on from the checkpoint of step 8\n", said)
    assert "  step-8: 36 samples are trained again, from step 8 on" in said
    assert [(len(segment["devices"]), segment["slot"]) for segment in state.segments] == [(3, 0), (2, 8)]
    assert sum(state.rank_samples) == state.samples == 192  # each once: a state with gaps is refused
    alone = train(devices="cpu", progress="off")
    for kind in ("params", "optimizer"):
        for key, value in getattr(alone, kind).items():
            if not key.startswith("random."):
                torch.testing.assert_close(getattr(state, kind)[key], value, rtol=0, atol=1e-10)


@pytest.mark.soak
def test_without_a_checkpoint_the_run_ends_in_words(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 2 .* was ended by SIGKILL; strategy='fsdp' .* save_every=") as found:
        train_killed(tmp_path / "out", "fsdp", saved=None, at=2, save_every="1000 steps")
    assert "\n" not in str(found.value)
    with pytest.raises(RankError, match=r"strategy='fsdp' .* redundancy=1 keeps a copy of each part, save_every="):
        train_killed(tmp_path / "other", "fsdp", saved=None, at=2)
