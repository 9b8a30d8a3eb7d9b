"""A model that a strategy holds is not converted, in words, and trains on; one that it has given back is."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.parallel.parts import WRAPS, make_adamw
from tests.parallel.tower import inputs, run, tower
from tests.ranks import ThreadGroup, on_threads
from uneven.errors import InputError
from uneven.parallel import FSDP, Strategy, Zero2

NAMES = [name for name in WRAPS if name != "TensorParallel"]
CONVERSIONS: dict[str, Callable[[nn.Module], object]] = {
    "float": lambda model: model.to(torch.float32),
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "meta": lambda model: model.to("meta"),
    "a layer": lambda model: model[2].float(),  # type: ignore[index]
}


def step(strategy: Strategy, number: int) -> None:
    (strategy.module(inputs(number)).square().sum() / 2).backward()
    strategy.optimizer.step()
    strategy.optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("name", NAMES)
def test_a_conversion_is_refused_and_the_model_trains_on(name: str) -> None:
    plain = tower()
    expected = run(plain, make_adamw(plain.parameters()))

    def rank(group: ThreadGroup) -> nn.Module:
        model = tower()
        strategy = WRAPS[name](model, make_adamw, group)
        for number, conversions in enumerate((CONVERSIONS, CONVERSIONS, {})):  # without and with gradients
            for convert in conversions.values():
                with pytest.raises(InputError, match=r"holds the model's params.*convert the model before"):
                    convert(model)
            assert model.double().cpu() is model  # what it is already
            step(strategy, number)
        params = strategy.full_params()
        torch.testing.assert_close(params, expected, rtol=1e-10, atol=1e-12)
        strategy.close()
        return model

    for model in on_threads(2, rank):
        torch.testing.assert_close(dict(model.state_dict()), expected, rtol=1e-10, atol=1e-12)
        assert model.float()(inputs(0).float()).dtype is torch.float32
        assert not any("_apply" in vars(module) for module in model.modules())


def test_the_memory_format_stays_too() -> None:
    def rank(group: ThreadGroup) -> None:
        for wrap in (FSDP, Zero2):
            model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 3))
            strategy = wrap(model, make_adamw, group)
            with pytest.raises(InputError, match="memory format"):
                model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            strategy.close()

    on_threads(2, rank)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "FSDP"])
def test_copies_and_what_is_whole_and_frozen_are_converted(name: str) -> None:
    def rank(group: ThreadGroup) -> None:
        model = tower()
        model[0].requires_grad_(False)
        strategy = WRAPS[name](model, make_adamw, group)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for copied in (copy.deepcopy(model), torch.load(file, weights_only=False), copy.deepcopy(copy.deepcopy(model))):
            assert {param.dtype for param in copied.float().parameters()} == {torch.float32}
        assert {param.dtype for param in model.parameters()} == {torch.float64}
        model[0].float()
        assert model[0].weight.dtype is torch.float32
        strategy.close()

    on_threads(2, rank)


def test_a_model_whose_strategy_is_gone_is_converted() -> None:
    model = tower()
    strategy = WRAPS["DDPBucketed"](model, make_adamw, on_threads(1, lambda group: group)[0])
    del strategy
    assert model.float()[0].weight.dtype is torch.float32
