"""The arithmetic of a step, every parameter against hand-written PyTorch."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.step.nets import CPU, OPTIMIZERS, batches, joined, loss_and_count, make_net, make_step, mean_loss
from uneven import InputError
from uneven.comm.group import SoloGroup
from uneven.step.eager import BeforeUpdate, EagerStep
from uneven.step.precision import Precision


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
@pytest.mark.parametrize("sizes", [[12], [5, 5, 2], [1, 11]])
def test_micro_batches_of_any_size_equal_one_big_batch(
    optimizer: str, max_grad_norm: float | None, sizes: list[int]
) -> None:
    step = make_step(mean_loss, optimizer, max_grad_norm)
    model = make_net()
    dense = OPTIMIZERS[optimizer](model.parameters())
    for seed in range(5):
        parts = batches(sizes, seed)
        step(parts, sum(sizes))
        dense.zero_grad()
        mean_loss(model, joined(parts)).backward()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        dense.step()
    for ours, theirs in zip(step.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("sizes", [[12], [5, 5, 2]])
def test_a_loss_sum_is_divided_by_the_count_of_the_whole_slot(sizes: list[int]) -> None:
    step = make_step(loss_and_count, "sgd", 0.5)
    model = make_net()
    dense = OPTIMIZERS["sgd"](model.parameters())
    for seed in range(5):
        parts = batches(sizes, seed)
        step(parts, sum(sizes))
        dense.zero_grad()
        total, count = loss_and_count(model, joined(parts))
        (total / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        dense.step()
    for ours, theirs in zip(step.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_a_slot_without_a_single_unit_changes_nothing() -> None:
    step = make_step(loss_and_count, "adam")
    before = [p.clone() for p in step.model.parameters()]
    step([((torch.randn(3, 6, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)), 3)], 3)
    assert all(torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True))


@pytest.mark.parametrize("train_step", [mean_loss, loss_and_count])
def test_the_meter_gives_the_mean_over_all_units(train_step: Any) -> None:
    step = make_step(train_step, "sgd")
    parts = batches([5, 5, 2])
    with torch.no_grad():
        expected = train_step(step.model, joined(parts))
        expected = expected[0] / expected[1] if isinstance(expected, tuple) else expected
    step(parts, 12)
    assert step.meter.glance() == pytest.approx(expected.item(), rel=1e-12)
    assert step.meter.take(SoloGroup()) == pytest.approx(expected.item(), rel=1e-12)
    assert step.meter.glance() is None  # NaN is a loss that is NaN
    assert math.isnan(step.meter.take(SoloGroup()))  # empty again: not a number


@pytest.mark.parametrize("train_step", [mean_loss, loss_and_count])
def test_a_number_of_one_element_is_a_number_whatever_its_dimensions(train_step: Any) -> None:
    def with_dimensions(model: nn.Module, batch: Any) -> Any:
        result = train_step(model, batch)
        return tuple(part.reshape(1, 1) for part in result) if isinstance(result, tuple) else result.reshape(1)

    plain, same = make_step(train_step, "sgd"), make_step(with_dimensions, "sgd")
    for step in (plain, same):
        step(batches([5, 5, 2]), 12)
    assert same.meter.glance() == plain.meter.glance()
    for ours, theirs in zip(same.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("result", [None, 1.5, torch.zeros(3), (lambda: 0)])
def test_a_wrong_return_of_the_train_step_is_named(result: Any) -> None:
    step = make_step(lambda model, batch: result, "sgd")
    with pytest.raises(InputError, match="mean loss as one scalar tensor"):
        step(batches([4]), 4)


def test_an_accuracy_that_stands_for_a_count_is_told_once() -> None:
    step = make_step(lambda model, batch: (mean_loss(model, batch), torch.tensor(0.25)), "sgd")
    with pytest.warns(UserWarning, match=r"returned \(loss, 0.25\), which is read as \(loss_sum, count\)"):
        step(batches([8]), 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(batches([8]), 8)
        make_step(loss_and_count, "sgd")(batches([8]), 8)


@pytest.mark.parametrize("train_step", [mean_loss, loss_and_count])
def test_gradients_outside_the_optimizer_count_in_the_norm_of_their_own_step_alone(train_step: Any) -> None:
    model, plain = make_net(), make_net()
    step = EagerStep(
        model,
        torch.optim.SGD(list(model[2].parameters()), lr=1.0),
        train_step,
        Precision("fp32", CPU),
        BeforeUpdate(max_grad_norm=0.05),
    )
    optimizer = torch.optim.SGD(list(plain[2].parameters()), lr=1.0)
    for seed in range(4):
        parts = batches([3, 5], seed)
        assert step(parts, 8) is None
        plain.zero_grad()
        result = train_step(plain, joined(parts))
        (result[0] / result[1] if isinstance(result, tuple) else result).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        optimizer.step()
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(own, other, rtol=0, atol=1e-12)


def test_an_optimizer_may_hold_a_frozen_param_of_integers() -> None:
    model = make_net()
    model.register_parameter("table", nn.Parameter(torch.arange(3), requires_grad=False))
    step = EagerStep(model, torch.optim.Adam(model.parameters()), mean_loss, Precision("fp32", CPU))
    assert step(batches([4]), 4) is None
    assert model.table.tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.complex64])
def test_a_count_is_divided_by_in_its_own_precision(dtype: torch.dtype) -> None:
    """In half precision 70,000 would be infinite, and every gradient 0; a complex number cannot divide a real one."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.ones(2, dtype=dtype))
            self.second = nn.Parameter(torch.ones(2))

    def counted(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        return (model.first.abs() * model.second).sum() * 35_000, 70_000  # type: ignore[union-attr,operator]

    model = Mixed()
    step = EagerStep(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        counted,
        Precision("fp32", torch.device("cpu")),
    )
    step([(None, 4)], 4)
    for param in model.parameters():
        torch.testing.assert_close(param.detach(), torch.full_like(param, 0.5))
