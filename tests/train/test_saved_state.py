"""Optimizers of the user's own in checkpoints: whatever their `state_dict` has goes on; another one is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from tests.launch.checks.saved_runs import make
from tests.train.optimizer_states import train_saving
from tests.train.resumed_runs import assert_same
from uneven import InputError, TrainedState
from uneven.files import write_atomically
from uneven.results.record import RECORD, encode
from uneven.results.tensor_file import FileSum


class Counting(SGD):
    """A key of its own in its state_dict."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.05 / self.count
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count, "nested": {"table": torch.full((2,), self.count)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert float(state_dict["nested"]["table"][0]) == state_dict["count"]
        self.count = state_dict["count"]
        super().load_state_dict({name: state_dict[name] for name in ("state", "param_groups")})


class Global(SGD):
    """State that is no param's."""

    def step(self, closure: Any = None) -> Any:
        state = self.state["global"]
        state["steps"] = state.get("steps", 0) + 1
        for group in self.param_groups:
            group["lr"] = 0.05 / state["steps"]
        return super().step(closure)


class Grouped(SGD):
    """A dict and a function in a param group."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group.update(info={"steps": 0}, rate=lambda steps: 0.05 / steps)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["info"]["steps"] += 1
            group["lr"] = group["rate"](group["info"]["steps"])
        return super().step(closure)


def train(optimizer: Any, **options: Any) -> TrainedState:
    return train_saving(make, lambda params: optimizer(params, lr=0.05), **options)


@pytest.mark.parametrize("optimizer", [Counting, Global, Grouped])
def test_state_of_the_optimizers_own_goes_on(optimizer: Any, tmp_path: Path) -> None:
    whole = train(optimizer, out=tmp_path / "whole")
    for slot in (3, 6):
        again = train(optimizer, out=tmp_path / f"{slot}", resume=tmp_path / f"whole/step-{slot}")
        assert_same(again, whole)
        assert again.param_groups == whole.param_groups
        assert again.optimizer.keys() == whole.optimizer.keys()
    assert TrainedState.load(tmp_path / "whole").param_groups[0]["lr"] == 0.05 / 10


class Transposed(nn.Module):
    """A param whose rows do not follow one another in memory, as in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(1)
        self.layer, self.out = nn.Linear(4, 3), nn.Linear(3, 1)
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=own)
        self.layer.weight.data = self.layer.weight.data.t().contiguous().t()

    def forward(self, x: Tensor) -> Any:
        return self.out(torch.tanh(self.layer(x)))


@pytest.mark.parametrize(
    "optimizer", [lambda p: AdamW(p, lr=0.05, fused=True), lambda p: SGD(p, lr=0.05, momentum=0.9, fused=True)]
)
def test_a_fused_step_goes_on_with_the_state_of_each_element(optimizer: Any, tmp_path: Path) -> None:
    """It goes through param and state by their memory; the file has other strides than the param."""
    whole = train_saving(Transposed, optimizer, out=tmp_path / "whole")
    again = train_saving(Transposed, optimizer, out=tmp_path / "again", resume=tmp_path / "whole/step-3")
    assert_same(again, whole)


def without_class(checkpoint: Path) -> None:
    """As checkpoints were before the class of the optimizer was written."""
    part = json.loads((checkpoint / "rank-0.json").read_bytes())
    del part["optimizer"]["class"], part["crc32"]
    content = encode(part)
    write_atomically(checkpoint / "rank-0.json", content)
    record = json.loads((checkpoint / RECORD).read_bytes())
    del record["crc32"]
    (checkpoint / RECORD).write_bytes(
        encode({**record, "files": {**record["files"], "rank-0.json": FileSum.of(content).to_json()}})
    )


@pytest.mark.parametrize("has_class", [True, False])
@pytest.mark.parametrize(("first", "then"), [(AdamW, SGD), (SGD, AdamW)])
def test_a_checkpoint_of_another_optimizer_is_refused(first: Any, then: Any, has_class: bool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(first, out=run)
    shutil.rmtree(run / "step-10")
    (run / RECORD).unlink()
    if not has_class:
        for folder in run.glob("step-*"):
            without_class(folder)
    for changes in ({"resume": run / "step-3"}, {"resume": run}, {"resume": "auto", "out": run}):
        with pytest.raises(InputError) as refused:
            train(then, **changes)
        assert f"this run's is {then.__name__}; make the optimizer as that run did" in str(refused.value)
        assert "\n" not in str(refused.value)
    assert train(first, resume=run).finished


def test_adam_is_not_adamw(tmp_path: Path) -> None:
    train(Adam, out=tmp_path)
    with pytest.raises(InputError, match="its optimizer is Adam, this run's is AdamW"):
        train(AdamW, resume=tmp_path / "step-3", out=tmp_path / "other")
