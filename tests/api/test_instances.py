"""`fit` with a model and an optimizer that are made already: each device trains a deep copy, on the same params."""

import pickle
import threading
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.optim import SGD

from tests.train.test_gradient_sync import OPTIMIZERS, Net, X, Y, mean_loss
from uneven import InputError, fit
from uneven.api.instances import as_factories
from uneven.data.tensors import TensorData

DATA = TensorData(X.double(), Y)
SETTINGS: Any = {"step": mean_loss, "dataset": DATA, "batch_size": 24, "epochs": 1, "devices": "cpu", "progress": "off"}


def test_fit_trains_copies_of_instances() -> None:
    expected = fit(model=lambda: Net(torch.float64), optimizer=OPTIMIZERS["sgd"], **SETTINGS)
    model = Net(torch.float64)
    groups = [
        {"params": model.second.parameters()},
        {"params": [*model.first.parameters(), *model.unused.parameters()]},
    ]
    for optimizer in (OPTIMIZERS["sgd"], OPTIMIZERS["sgd"](groups)):
        state = fit(model=model, optimizer=optimizer, **SETTINGS)
        for name, value in state.params.items():
            torch.testing.assert_close(value, expected.params[name], rtol=1e-12, atol=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), Net(torch.float64).parameters(), strict=True))


def test_copies_hold_each_others_params_in_another_process_too() -> None:
    model = Net(torch.float64)
    factories = as_factories(model, SGD(model.parameters(), lr=0.5, momentum=0.9))
    make_model, make_optimizer = pickle.loads(cloudpickle.dumps(factories))
    copied = make_model()
    optimizer = make_optimizer(copied.parameters())
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], copied.parameters(), strict=True))
    assert optimizer.param_groups[0]["momentum"] == 0.9


OTHERS = SGD(Net(torch.float64).parameters(), lr=0.1)


class Locked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("model", "optimizer", "words"),
    [
        (Locked(), torch.optim.Adam, "model=Locked.* cannot be copied for each device .*model=lambda: Net"),
        (
            Net(torch.float64),
            SGD(Net(torch.float64).parameters(), lr=0.1),
            "holds 6 of 6 params that are not the model's",
        ),
        (
            lambda: Net(torch.float64),
            SGD(Net(torch.float64).parameters(), lr=0.1),
            "pass a function, as in optimizer=lambda",
        ),
    ],
)
def test_what_cannot_be_rebuilt_is_said(model: Any, optimizer: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        fit(model=model, optimizer=optimizer, **SETTINGS)
