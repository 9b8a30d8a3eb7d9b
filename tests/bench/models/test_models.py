"""Every benchmark model: its size, its schedule, and that it learns through the public API."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from uneven import InputError, TensorData, fit
from uneven.bench import models

PARAMS = {
    "logistic": 7_850,
    "mlp": 203_530,
    "lenet": 44_470,
    "conv-ae": 9_569,
    "char-rnn": 946_625,
    "gpt-nano": 826_433,
    "resnet-20": 272_474,
    "resnet-graph": 272_474,
}


def small_data(name: str, samples: int) -> TensorData:
    generator = torch.Generator().manual_seed(0)
    if name in ("char-rnn", "gpt-nano"):
        tokens = torch.randint(0, 65, (samples, 17), generator=generator)
        return TensorData(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    shape = (3, 32, 32) if name.startswith("resnet") else (1, 28, 28)
    images = torch.rand(samples, *shape, generator=generator)
    return TensorData(images, torch.randint(0, 10, (samples,), generator=generator))


def test_the_models_are_the_eight_of_the_suite() -> None:
    assert set(models.NAMES) == set(PARAMS)


@pytest.mark.parametrize("name", models.NAMES)
def test_param_count(name: str) -> None:
    recipe = models.get(name)
    assert sum(param.numel() for param in recipe.make_model().parameters()) == PARAMS[name] == recipe.num_params


@pytest.mark.parametrize("name", models.NAMES)
def test_it_learns_a_few_samples_by_heart(name: str) -> None:
    recipe = models.get(name)
    state = fit(
        model=recipe.make_model,
        optimizer=recipe.make_optimizer,
        step=recipe.train_step,
        dataset=small_data(name, 8),
        evaluate=(small_data(name, 8), recipe.eval_step),
        batch_size=8,
        epochs=12 if name in ("resnet-20", "resnet-graph", "char-rnn") else 20,
        devices="cpu",
        progress="off",
    )
    assert state.history[-1]["train_loss"] < 0.98 * state.history[0]["train_loss"]
    assert math.isfinite(state.history[-1][recipe.metric])


@pytest.mark.parametrize("name", ["char-rnn", "gpt-nano"])
def test_a_language_model_cannot_see_the_future(name: str) -> None:
    model = models.get(name).make_model().eval()
    tokens = torch.randint(0, 65, (1, 20))
    changed = tokens.clone()
    changed[0, 12] = (changed[0, 12] + 1) % 65
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[0, :12], after[0, :12], atol=1e-6)
    assert not torch.allclose(before[0, 12:], after[0, 12:], atol=1e-6)


def rates(name: str, total: int) -> list[float]:
    recipe = models.get(name)
    assert recipe.make_scheduler is not None
    optimizer = recipe.make_optimizer([torch.zeros(1, requires_grad=True)])
    scheduler = recipe.make_scheduler(optimizer, total)
    seen = []
    for _ in range(total):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_gpt_warms_up_over_a_fifth_and_ends_at_a_hundred_thousandth() -> None:
    seen = rates("gpt-nano", 1000)
    assert seen[0] == pytest.approx(3e-4 / 200)
    assert max(seen) == pytest.approx(3e-4)
    assert seen.index(max(seen)) in (199, 200)
    assert seen[-1] == pytest.approx(1e-5, rel=0.01)
    assert all(a >= b for a, b in pairwise(seen[200:]))


def test_resnet_drops_tenfold_at_half_and_three_quarters() -> None:
    seen = rates("resnet-20", 400)
    assert [seen[i] for i in (0, 199, 200, 299, 300, 399)] == pytest.approx([0.1, 0.1, 0.01, 0.01, 1e-3, 1e-3])


def test_an_unknown_model_names_the_known_ones() -> None:
    with pytest.raises(InputError, match="resnet-20"):
        models.get("resnet")


@pytest.mark.parametrize("name", models.NAMES)
def test_eval_step_sums_do_not_depend_on_the_batching(name: str) -> None:
    recipe = models.get(name)
    model = recipe.make_model().eval()
    data = small_data(name, 10)

    def total(*cuts: Any) -> float:
        parts = [recipe.eval_step(model, data.take(torch.arange(*cut), None)) for cut in cuts]
        return float(sum(sums[recipe.metric] for sums, _ in parts)) / sum(count for _, count in parts)

    with torch.no_grad():
        assert total((0, 10)) == pytest.approx(total((0, 7), (7, 10)), rel=1e-5)
