"""What a run may be resumed from, and what becomes of its folder: one device, in this process."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.forked import run_forked
from tests.results.checkpoints import flip_byte
from uneven import TensorData, TrainedState, fit
from uneven.errors import InputError
from uneven.results.record import RECORD, encode

torch.manual_seed(0)
X, Y = torch.randn(40, 4), torch.randn(40, 1)  # 5 slots an epoch
FILES = ("state.json", "state.safetensors", "rank-0.json", "rank-0.safetensors")
Fit = Callable[..., TrainedState]


def make() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, 1)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def train(model: Callable[[], nn.Module] = make, samples: int = 40, **changes: Any) -> TrainedState:
    options = {"batch_size": 8, "epochs": 2, "seed": 5, "devices": "cpu", "progress": "lines", **changes}
    data = TensorData(X[:samples], Y[:samples])
    return fit(model=model, optimizer=adam, step=step, dataset=data, **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose result is gone, as if it had been killed after its third checkpoint."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train(out=folder, save_every="3 steps")
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for path in folder.iterdir():
        if path.is_file() and path.name != ".uneven":
            path.unlink()
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_equal(found: TrainedState, folder: Path) -> None:
    wanted = TrainedState.load(folder)
    assert (found.slot, found.finished, found.samples) == (wanted.slot, True, wanted.samples)
    for name, value in wanted.params.items():
        assert torch.equal(found.params[name], value), name


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def of_another_version(path: Path) -> None:
    record = json.loads(path.read_bytes())
    del record["crc32"]
    path.write_bytes(encode({**record, "version": 3}))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    **{f"a flipped byte in {name}": (lambda folder, name=name: flip_byte(folder / name, 100), name) for name in FILES},
    **{f"no {name}": (lambda folder, name=name: (folder / name).unlink(), f"{name} is missing") for name in FILES},
    **{f"half of {name}": (lambda folder, name=name: shorten(folder / name), name) for name in FILES},
    "an empty folder": (lambda folder: [path.unlink() for path in folder.iterdir()], ""),
    "another version": (lambda folder: of_another_version(folder / RECORD), "version 3"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_auto_takes_the_one_before_it(
    run: Path, whole: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, words = DAMAGES[damage]
    spoil(run / "step-9")
    before = content(run)
    for named in (run / "step-9", run):
        with pytest.raises(InputError) as refused:
            train(resume=named)
        assert "\n" not in str(refused.value)
        assert words in str(refused.value)
        assert "step-9" in str(refused.value)
    assert content(run) == before
    capsys.readouterr()
    state = train(out=run, resume="auto", save_every="3 steps")
    said = capsys.readouterr().err
    assert "passed over: checkpoint" in said
    assert f"resumes from {run / 'step-6'}: 6 steps are trained" in said
    assert "1 later checkpoint" in said
    assert_equal(state, whole)
    assert {path.name for path in run.glob("s*-*")} == {"step-3", "step-6", "step-9", "superseded-1"}
