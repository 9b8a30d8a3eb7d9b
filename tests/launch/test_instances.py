"""Models and optimizers given as instances: the same params as from functions, and nothing of the user's is changed."""

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from uneven import InputError, TensorData, fit
from uneven.config import Task
from uneven.launch.instances import rebuild_instances
from uneven.launch.payload import read_payload, write_payload

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = X @ torch.arange(4, dtype=torch.float64).unsqueeze(1)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)).double()


def two_groups(model: nn.Sequential) -> torch.optim.Optimizer:
    groups = [{"params": model[2].parameters(), "lr": 0.03}, {"params": model[0].parameters(), "betas": (0.8, 0.9)}]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


MAKERS = {
    "adamw in groups": two_groups,
    "adagrad, with a state from its start": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
}


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_instances_train_as_functions_do_and_stay_as_they_are(make: Any) -> None:
    given = net()
    optimizer = make(given)
    before, optimizer_before = copy.deepcopy(given.state_dict()), copy.deepcopy(optimizer.state_dict())
    common: dict[str, Any] = {"step": loss_of, "dataset": TensorData(X, Y), "batch_size": 8, "epochs": 3}
    common |= {"devices": "cpu", "progress": "off"}
    ours = fit(model=given, optimizer=optimizer, **common)

    made: list[nn.Sequential] = []

    def make_model() -> nn.Module:
        made.append(copy.deepcopy(given))
        return made[-1]

    theirs = fit(model=make_model, optimizer=lambda _: make(made[-1]), **common)
    assert list(ours.params) == [name for name, _ in given.named_parameters()]
    for name, value in theirs.params.items():
        assert torch.equal(ours.params[name], value), name
        assert name.startswith("1.") or not torch.equal(before[name], value), f"{name} was not trained"
    assert all(torch.equal(value, before[name]) for name, value in given.state_dict().items())
    assert str(optimizer.state_dict()) == str(optimizer_before)


def test_a_rank_rebuilds_them_from_the_payload_for_its_own_params(tmp_path: Path) -> None:
    given = net()
    task = Task(given, two_groups(given), loss_of, TensorData(X, Y))  # type: ignore[arg-type]
    rebuilt, notes = rebuild_instances(task)
    assert "stays as it is" in notes[0]
    write_payload(rebuilt, tmp_path)
    there = read_payload(tmp_path)
    model = there.make_model()
    params = list(model.parameters())
    optimizer = there.make_optimizer(model.parameters())
    assert [[id(param) for param in group["params"]] for group in optimizer.param_groups] == [
        [id(params[4]), id(params[5])],
        [id(params[0]), id(params[1])],
    ]
    assert [group["lr"] for group in optimizer.param_groups] == [0.03, 0.01]
    assert optimizer.param_groups[1]["betas"] == (0.8, 0.9)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(params, given.parameters(), strict=True))
    assert there.make_model() is not model
    with pytest.raises(InputError, match="for 6 params was given and 2 are trained"):
        there.make_optimizer(params[:2])


def test_what_cannot_be_copied_is_refused_with_the_reason() -> None:
    model = net()
    optimizer = two_groups(model)
    optimizer.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(
        InputError, match=r"AdamW cannot be copied .*cannot pickle '_thread.lock'.*optimizer=lambda params"
    ):
        rebuild_instances(Task(model, optimizer, loss_of, X))  # type: ignore[arg-type]
