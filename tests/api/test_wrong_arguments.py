"""Wrong arguments of the public names beside `fit` are one line with the fix, before anything is computed by them."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

from uneven import Ddp, InputError, MuonAdamW, TensorData, TrainedState

X = torch.randn(16, 4)
DATA = TensorDataset(X, X[:, :2])
STATE = TrainedState({}, {})


def loss_of(model: nn.Module, batch: Any) -> Any:
    return F.mse_loss(model(batch[0]), batch[1])


def eval_step(model: nn.Module, batch: Any) -> Any:
    return {"loss": loss_of(model, batch) * len(batch[0])}, len(batch[0])


def builder() -> Any:
    made = Ddp.builder(lambda: nn.Linear(4, 2), torch.optim.SGD, loss_of).dataset(DATA)
    return made.settings(batch_size=8, epochs=1, devices="cpu", progress="off")


def in_a_loop(call: Callable[[Any], object]) -> Callable[[], object]:
    """The call between two epochs of a loop of one's own."""

    def run() -> object:
        model = nn.Linear(4, 2)
        settings: Any = {"batch_size": 8, "epochs": 2, "devices": "cpu", "progress": "off"}
        with Ddp.setup(model, torch.optim.SGD, dataset=DATA, scheduler=ReduceLROnPlateau, **settings) as ddp:
            for batch in ddp.batches(0):
                ddp.step(loss_of(model, batch))
            return call(ddp)

    return run


WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: builder().evaluate(DATA, eval_step, batch_size=0).run(), "batch_size=0) must be a whole number"),
    (lambda: builder().evaluate(DATA, eval_step, batch_size=2.5).run(), "batch_size=2.5) must be a whole number"),
    (lambda: builder().on_epoch(3), "on_epoch must be a function of an entry of the history, got int"),
    (in_a_loop(lambda ddp: ddp.evaluate(DATA, eval_step, -1)), "batch_size=-1) must be a whole number"),
    (in_a_loop(lambda ddp: ddp.evaluate(3, eval_step)), "the test set of evaluate must be map-style"),
    (in_a_loop(lambda ddp: ddp.evaluate(DATA, 3)), "eval_step must be a function, got int 3"),
    (in_a_loop(lambda ddp: ddp.scheduler_step("low")), "scheduler_step(metric) takes one number, got str"),
    (in_a_loop(lambda ddp: ddp.scheduler_step(X)), "scheduler_step(metric) takes one number, got Tensor"),
    (lambda: Ddp.wrap(nn.Linear), "Ddp.wrap takes the model itself, as in Ddp.wrap(Net()), got <class 'torch"),  # type: ignore[arg-type]
    (lambda: Ddp.wrap(3), "Ddp.wrap takes the model itself, as in Ddp.wrap(Net()), got 3"),  # type: ignore[arg-type]
    (lambda: Ddp.wrap(nn.Linear(4, 2)).weighted_all_reduce_gradients("all"), "count='all' must be a number of samples"),  # type: ignore[arg-type]
    (lambda: STATE.load_into(nn.Linear), "load_into takes a model, as in state.load_into(Net()), got <class 'torch"),  # type: ignore[arg-type]
    (lambda: TensorData(X.numpy()), "needs tensors with a row for each sample, got ndarray; torch.as_tensor"),  # type: ignore[arg-type]
    (lambda: TensorData(torch.tensor(1.0)), "got one without dimensions"),
    (lambda: TensorData(X, transform="flip"), "transform='flip') must be a function of (rows, keys)"),  # type: ignore[arg-type]
    (lambda: MuonAdamW(nn.Linear(4, 2).parameters()), "groups of params, each with its kind"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "words"), WRONG, ids=[words for _, words in WRONG])
def test_a_wrong_argument_is_one_line(call: Callable[[], object], words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)) as caught:
        call()
    assert "\n" not in str(caught.value)
