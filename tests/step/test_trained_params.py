"""Params that are unfrozen or added while a run is on: refused on every rank, by every policy."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.api.loops import make_loop
from tests.ranks import ThreadGroup, on_threads
from tests.train.exact_runs import Net, train
from uneven import InputError
from uneven.api.loop import Loop
from uneven.errors import LeftLoopError

WORDS = r"first.weight was unfrozen while the run is on.*requires_grad before the run begins"
POLICIES: list[dict[str, Any]] = [
    {"policy": "sync"},
    {"policy": "balanced", "shares": (1, 0)},  # the second rank has no samples
    {"policy": "cadence"},
    {"policy": "async"},
]


def half_frozen(dtype: torch.dtype = torch.float64) -> Net:
    net = Net(dtype)
    net.first.requires_grad_(False)
    return net


def said(change: Callable[[Loop], object], **options: Any) -> list[str]:
    """What each rank's loop raises where `change` comes before the second epoch."""

    def rank(group: ThreadGroup) -> str:
        loop = make_loop(group, model=half_frozen(), **options)
        try:
            for epoch in range(2):
                if epoch:
                    change(loop)
                for x, y in loop.batches(epoch):
                    loop.step(F.cross_entropy(loop(x), y))
            loop.finish()
        except (InputError, LeftLoopError) as error:
            return str(error)
        return ""

    return on_threads(2, rank)


def unfreeze(loop: Loop) -> None:
    module = loop.worker.engine.model
    assert isinstance(module, Net)
    module.first.requires_grad_(True)


@pytest.mark.parametrize("options", POLICIES, ids=lambda options: options["policy"])
def test_unfreezing_between_two_epochs_is_refused(options: dict[str, Any]) -> None:
    options = options if options["policy"] == "balanced" else {**options, "global_batch_size": None}
    found = said(unfreeze, **options)
    # A rank of a local policy may hear that its peer has left before it comes to a step of its own.
    is_heard = options["policy"] in ("cadence", "async")
    named = ["first.weight was unfrozen while the run is on" in words for words in found]
    assert any(named)
    assert all(own or (is_heard and "left its epoch" in words) for own, words in zip(named, found, strict=True))


def test_a_param_that_is_added_is_refused_and_one_that_rests_is_not() -> None:
    def add(loop: Loop) -> None:
        loop.worker.engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})

    def freeze(loop: Loop) -> None:
        loop.worker.engine.model.get_submodule("second").requires_grad_(False)
        loop.worker.engine.model.get_submodule("second").requires_grad_(True)

    assert all(r"shape (2,) was added to the optimizer" in words for words in said(add))
    assert said(freeze) == ["", ""]


@pytest.mark.parametrize("options", [{}, {"strategy": "zero2"}, {"policy": "cadence"}], ids=str)
def test_a_train_step_that_unfreezes_is_refused(options: dict[str, Any]) -> None:
    steps = {}

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        steps[model] = steps.get(model, 0) + 1
        if steps[model] == 10:  # behind those that measure the ranks
            model.get_submodule("first").requires_grad_(True)
        return F.cross_entropy(model(batch[0]), batch[1])

    sharded = "make strategy and optimizer again"  # where no rank owns the param, its step knows at once
    with pytest.raises(InputError, match=sharded if "strategy" in options else WORDS):
        train(2, step=step, make_model=half_frozen, epochs=6, shares=(1, 1), **options)


def test_one_of_several_optimizers_may_not_get_more_params_either() -> None:
    def rank(group: ThreadGroup) -> str:
        parts = {"g": nn.Linear(6, 6).double(), "d": nn.Linear(6, 3).double()}
        parts["g"].requires_grad_(False)
        parts["g"].bias.requires_grad_(True)
        optimizers = {name: torch.optim.SGD(part.parameters(), lr=0.1) for name, part in parts.items()}
        loop = make_loop(group, model=parts, optimizer=optimizers)
        try:
            for epoch in range(2):
                parts["g"].requires_grad_(True)
                for x, y in loop.batches(epoch):
                    loop.step(F.cross_entropy(parts["d"](parts["g"](x)), y), optimizer="d")
        except (InputError, LeftLoopError) as error:
            return str(error)
        return ""

    assert all("g.weight was unfrozen" in words for words in on_threads(2, rank))
