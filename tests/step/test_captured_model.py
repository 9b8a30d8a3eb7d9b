"""What host code decides by is a constant in a captured step: a change is refused in both captured forms of a step."""

from typing import Any

import pytest
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from tests.step.captures import CPU, Pair
from tests.step.captures import captures as captures
from tests.step.graph_runs import train as train_on_cuda
from tests.train.exact_runs import mean_loss
from uneven import InputError
from uneven.step.capture import CapturedModel


def make_model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].weight.requires_grad_(False)
    return model


def test_nothing_to_refuse() -> None:
    model = make_model()
    captured = CapturedModel(model)
    captured.check()
    model[1].weight.requires_grad_(True)
    model[1].weight.requires_grad_(False)
    model.eval()
    model.train()
    captured.check()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: model[1].weight.requires_grad_(True), "1.weight was unfrozen while the run is on"),
        (lambda model: model[0].requires_grad_(False), "0.weight was frozen while the run is on"),
        (lambda model: model[1].eval(), "1 was put into eval mode while the run is on"),
        (lambda model: model.eval(), "the model was put into eval mode while the run is on"),
    ],
)
def test_a_change_is_named(change: Any, words: str) -> None:
    model = make_model()
    captured = CapturedModel(model)
    change(model)
    with pytest.raises(InputError, match=f"^compile='graph': {words}: .* use compile='off'$"):
        captured.check()


def freeze_later(optimizer: Any, steps: int = 0) -> LambdaLR:
    """A schedule is host code that runs between the steps."""
    del steps

    def rate(step: int) -> float:
        optimizer.param_groups[0]["params"][0].requires_grad_(step < 2)
        return 1.0

    return LambdaLR(optimizer, rate)


def test_captured_backwards_refuse_it(captures: list[list[int]]) -> None:
    pair = Pair(mean_loss, CPU)
    pair.step([8], 8)
    pair.step([8], 8)
    for eager in (pair.eager, pair.captured):
        next(eager.model.parameters()).requires_grad_(False)
    with pytest.raises(InputError, match="was frozen while the run is on"):
        pair.step([8], 8)
    assert captures == [[8]]


@pytest.mark.cuda
def test_a_whole_step_of_one_rank_refuses_it() -> None:
    with pytest.raises(InputError, match=r"0\.weight was frozen while the run is on"):
        train_on_cuda("graph", scheduler=freeze_later)
