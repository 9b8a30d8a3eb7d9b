"""What else a resumed run goes on with: number formats and their loss scaler, and evaluations by the clock."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.resumed_data import make_model
from tests.train.resumed_runs import assert_same
from uneven import TrainedState, fit
from uneven.results.checkpoint import read_checkpoint

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
DATA = torch.utils.data.TensorDataset(X, torch.arange(64) % 3)


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def train(**options: Any) -> TrainedState:
    return fit(
        model=lambda: make_model().float(),
        optimizer=torch.optim.Adam,
        step=loss_of,
        dataset=DATA,
        **{"batch_size": 8, "epochs": 2, "devices": "cpu", "progress": "off", **options},
    )


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_scaler_goes_on(precision: Any, tmp_path: Path) -> None:
    whole = train(precision=precision, save_every="5 steps", out=tmp_path / "whole")
    folder = tmp_path / "whole/step-10"
    scaler = read_checkpoint(folder).ranks[0].record["scaler"]
    assert (scaler is not None) == (precision == "fp16")
    assert scaler is None or scaler["_growth_tracker"] > 0
    assert_same(train(precision=precision, save_every="5 steps", resume=folder, out=tmp_path / "again"), whole)
    later = [read_checkpoint(tmp_path / f"{run}/step-15").ranks[0].record["scaler"] for run in ("whole", "again")]
    assert later[0] == later[1]


def test_evaluations_by_the_clock_do_not_change_what_is_trained(tmp_path: Path) -> None:
    def evaluate(model: Any, batch: Any) -> tuple[dict[str, Any], int]:
        return {"loss": loss_of(model, batch) * len(batch[1])}, len(batch[1])

    options = {"evaluate": (DATA, evaluate), "eval_every": "0.001 s", "save_every": "5 steps"}
    whole = train(out=tmp_path / "whole", **options)
    again = train(out=tmp_path / "again", resume=tmp_path / "whole/step-10", **options)
    assert_same(again, whole)
    before = [entry for entry in whole.history if entry["step"] <= 10]
    assert again.history[: len(before)] == before
    assert again.history[-1]["loss"] == whole.history[-1]["loss"]
