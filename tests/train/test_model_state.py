"""What a model keeps beside params and persistent buffers: in checkpoints and results, or refused at the start."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.train.optimizer_states import X, train_saving
from tests.train.resumed_runs import assert_same
from uneven import InputError, KeepBest, TensorData, TrainedState
from uneven.results.record import RECORD, encode, read_record
from uneven.results.saved_state import export_model, newest_state, open_state


class Counting(nn.Module):
    """Its output follows the number of its calls, which is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.calls = nn.Linear(4, 1), 0

    def forward(self, x: Tensor) -> Any:
        self.calls += int(self.training)
        return self.layer(x) * (1 + 0.01 * self.calls)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "table": torch.full((2,), self.calls)}

    def set_extra_state(self, state: Any) -> None:
        self.calls = int(state["calls"])
        assert int(state["table"][1]) == self.calls


class CountingInTensor(Counting):
    def get_extra_state(self) -> Any:
        return torch.tensor(self.calls)

    def set_extra_state(self, state: Any) -> None:
        self.calls = int(state)


class Drifting(nn.Module):
    """A buffer that no state_dict has, and that forward changes; another buffer under two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.other = nn.Linear(4, 1), nn.Module()
        self.register_buffer("drift", torch.zeros(1), persistent=False)
        self.register_buffer("total", torch.zeros(1))
        self.other.register_buffer("total", self.total)

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.drift += 0.1
            self.total += 0.1
        return self.layer(x) * (1 + self.drift + self.other.total)


def train(model: Any, **options: Any) -> TrainedState:
    return train_saving(model, lambda params: torch.optim.SGD(params, lr=0.02), **options)


@pytest.mark.parametrize("model", [Counting, CountingInTensor, Drifting])
def test_it_goes_on_bit_by_bit(model: Any, tmp_path: Path) -> None:
    whole = train(model, out=tmp_path / "whole")
    for slot in (3, 6):
        again = train(model, out=tmp_path / f"{slot}", resume=tmp_path / f"whole/step-{slot}")
        assert_same(again, whole)
    assert train(model, out=tmp_path / "whole", resume="auto").finished  # nothing is trained


@pytest.mark.parametrize("model", [Counting, CountingInTensor])
def test_results_and_exports_have_it(model: Any, tmp_path: Path) -> None:
    whole = train(model, out=tmp_path / "run")
    for state in (whole, TrainedState.load(tmp_path / "run"), TrainedState.load(tmp_path / "run/step-10")):
        assert state.load_into(model()).calls == 10
    for number, state in enumerate((newest_state(tmp_path / "run")[0], open_state(tmp_path / "run/step-10"))):
        made = model()
        export_model(state, tmp_path / f"{number}.pt")
        made.load_state_dict(torch.load(tmp_path / f"{number}.pt", weights_only=True))
        assert made.calls == 10
    if model is Counting:
        with pytest.raises(InputError, match=r"_extra_state is no tensor.*name a \.pt file"):
            export_model(newest_state(tmp_path / "run")[0], tmp_path / "model.safetensors")


def test_what_a_callback_keeps_has_it(tmp_path: Path) -> None:
    def eval_step(model: Any, batch: Any) -> tuple[dict[str, float], int]:
        return {"loss": float(model.calls)}, 1  # the first is the best

    options: dict[str, Any] = {"evaluate": (TensorData(X[:1]), eval_step), "callbacks": [KeepBest("loss")]}
    whole = train(Counting, out=tmp_path / "whole", **options)
    again = train(Counting, out=tmp_path / "again", resume=tmp_path / "whole/step-6", **options)
    assert [state.load_into(Counting()).calls for state in (whole, again)] == [5, 5]


class Pickled(Counting):
    def get_extra_state(self) -> Any:
        return {"handle": object()}


def test_what_cannot_be_kept_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"_extra_state of the model's state_dict\.handle is a object"):
        train(Pickled, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_without_it_is_refused_in_one_line(tmp_path: Path) -> None:
    train(Counting, out=tmp_path / "run")
    folder = tmp_path / "run/step-3"
    record = read_record(folder)
    del record["extra"]
    (folder / RECORD).write_bytes(encode(record))
    with pytest.raises(InputError, match="of an earlier version, which did not keep _extra_state of the model"):
        train(Counting, resume=folder, out=tmp_path / "other")
