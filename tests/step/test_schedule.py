import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from uneven import InputError
from uneven.step.schedule import Schedule


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)


def test_rates_are_those_of_the_position() -> None:
    optimizer = sgd()
    schedule = Schedule(lambda opt: lr_scheduler.StepLR(opt, 3, gamma=0.5), optimizer, 100)
    optimizer.step()
    for position in (0, 0, 2, 3, 7):  # positions may stay or jump
        schedule.move_to(position)
        assert schedule.rates == [0.5 ** (position // 3)]


def test_a_factory_of_two_arguments_gets_the_length_of_the_run() -> None:
    lengths = []

    def make(optimizer: torch.optim.Optimizer, total_steps: int) -> lr_scheduler.LRScheduler:
        lengths.append(total_steps)
        return lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=total_steps)

    Schedule(make, sgd(), 42)
    assert lengths == [42]


def test_a_default_argument_is_the_users_own() -> None:
    schedule = Schedule(lambda opt, gamma=0.1: lr_scheduler.StepLR(opt, 1, gamma=gamma), sgd(), 42)
    schedule._optimizer.step()
    schedule.move_to(1)
    assert schedule.rates == pytest.approx([0.1])


def test_what_is_no_scheduler_is_refused() -> None:
    with pytest.raises(InputError, match="made a NoneType; it must make a torch LRScheduler"):
        Schedule(lambda opt: None, sgd(), 10)


@pytest.mark.parametrize("scale", [1.0, 1.7])
def test_a_plateau_is_stepped_by_its_metric_alone_and_the_scale_does_not_enter_it(scale: float) -> None:
    def make(optimizer: torch.optim.Optimizer) -> lr_scheduler.ReduceLROnPlateau:
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, min_lr=0.02)

    theirs, optimizer = two_groups(), two_groups()
    plain, schedule = make(theirs), Schedule(make, optimizer, 100)
    assert schedule.needs_metric
    assert not Schedule(None, sgd(), 10).needs_metric
    seen = set()
    for position, metric in enumerate([3.0, 2.0, 2.0, 2.0, 2.5, 2.5, 2.5, 2.5, 1.0]):
        schedule.move_to(position, scale)
        schedule.move_to(position + 1, scale)
        plain.step(metric)
        schedule.step_metric(metric)
        wanted = [group["lr"] for group in theirs.param_groups]
        assert schedule.plain == wanted
        assert schedule.rates == [scale * rate for rate in wanted]
        seen.add(tuple(wanted))
    assert len(seen) >= 3, "the rate has fallen"


LENGTH = 40
MAKERS: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "step": lambda opt: lr_scheduler.StepLR(opt, 7, gamma=0.3),
    "multistep": lambda opt: lr_scheduler.MultiStepLR(opt, [3, 20], gamma=0.1),
    "exponential": lambda opt: lr_scheduler.ExponentialLR(opt, 0.93),
    "one cycle": lambda opt: lr_scheduler.OneCycleLR(opt, 0.7, total_steps=LENGTH),
    "cosine": lambda opt: lr_scheduler.CosineAnnealingLR(opt, LENGTH, eta_min=1e-3),
    "lambda": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step)),
    "warm-up, then cosine": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, 0.1, 1.0, 5), lr_scheduler.CosineAnnealingLR(opt, LENGTH)], [5]
    ),
}
any_scheduler = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
Make = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]


def two_groups(first: Any = 0.1, second: Any = 0.03) -> torch.optim.Optimizer:
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in (first, second)]
    return torch.optim.SGD(groups, lr=1.0, momentum=0.9)


def plain_rates(make: Make) -> list[list[float]]:
    """The schedule without us, position by position."""
    optimizer = two_groups()
    scheduler = make(optimizer)
    rates = []
    for _ in range(LENGTH):
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return rates


@any_scheduler
@pytest.mark.parametrize("scale", [1.0, 1.7, 0.3])
def test_a_scale_multiplies_the_plain_schedule_and_does_not_enter_it(make: Make, scale: float) -> None:
    optimizer, expected = two_groups(), plain_rates(make)
    schedule = Schedule(make, optimizer, LENGTH)
    for position in range(LENGTH):
        schedule.move_to(position, scale)
        assert schedule.rates == [scale * rate for rate in expected[position]]
        assert schedule.plain == expected[position]
        optimizer.step()


@any_scheduler
def test_the_scale_may_change_at_any_position_and_positions_may_jump_or_stay(make: Make) -> None:
    optimizer, expected = two_groups(), plain_rates(make)
    schedule = Schedule(make, optimizer, LENGTH)
    for position, scale in ((0, 1.0), (0, 1.2), (3, 1.5), (4, 1.5), (4, 2.5), (11, 0.5), (25, 1.0), (39, 3.0)):
        schedule.move_to(position, scale)
        assert schedule.rates == [scale * rate for rate in expected[position]]
        optimizer.step()


def test_without_a_scheduler_the_scale_multiplies_the_rates_given() -> None:
    schedule = Schedule(None, two_groups(), LENGTH)
    for position, scale in enumerate((1.0, 1.3, 1.3, 0.7, 1.0)):
        schedule.move_to(position, scale)
        assert schedule.rates == [scale * 0.1, scale * 0.03]
        assert schedule.plain == [0.1, 0.03]


@pytest.mark.parametrize("make", [None, MAKERS["exponential"]])
def test_a_rate_set_by_hand_is_the_new_plain_one(make: Make | None) -> None:
    optimizer = two_groups()
    schedule = Schedule(make, optimizer, LENGTH)
    decay = 1.0 if make is None else 0.93
    schedule.move_to(0, 2.0)
    optimizer.param_groups[0]["lr"] = 0.5
    schedule.move_to(0, 2.0)
    assert schedule.rates == [1.0, 0.06]
    schedule.move_to(1, 3.0)
    assert schedule.plain == [0.5 * decay, 0.03 * decay]
    assert schedule.rates == [3.0 * (0.5 * decay), 3.0 * (0.03 * decay)]


def test_a_rate_set_by_hand_under_scale_one_is_found_when_a_scale_comes() -> None:
    optimizer = two_groups()
    schedule = Schedule(None, optimizer, LENGTH)
    schedule.move_to(0, 1.0)
    optimizer.param_groups[1]["lr"] = 0.2
    schedule.move_to(1, 1.0)
    assert schedule.rates == [0.1, 0.2]
    schedule.move_to(2, 2.0)
    assert schedule.rates == [0.2, 0.4]


class Watched(dict[str, Any]):
    """A param group that counts how often its rate is set."""

    writes = 0

    def __setitem__(self, name: str, value: Any) -> None:
        self.writes += name == "lr"
        super().__setitem__(name, value)


@pytest.mark.parametrize("make", [None, lambda opt: lr_scheduler.StepLR(opt, 5)])
def test_a_scale_of_one_touches_nothing(make: Make | None) -> None:
    optimizer = two_groups()
    schedule = Schedule(make, optimizer, LENGTH)
    optimizer.param_groups[:] = groups = [Watched(group) for group in optimizer.param_groups]
    for position in range(12):
        schedule.move_to(position, 1.0)
    own = 0 if make is None else 11  # a torch scheduler sets its rates at every step
    assert [group.writes for group in groups] == [own, own]
    schedule.move_to(12, 2.0)
    assert groups[0].writes > own, "the count can move"


def test_a_rate_that_is_a_tensor_stays_that_tensor() -> None:
    """A compiled or captured optimizer reads it where it is."""
    rate = torch.tensor(0.5, dtype=torch.float64)
    optimizer = two_groups(rate, 0.25)
    schedule = Schedule(MAKERS["exponential"], optimizer, LENGTH)
    held = optimizer.param_groups[0]["lr"]
    assert isinstance(held, torch.Tensor)
    for position, scale in ((0, 2.0), (1, 3.0), (2, 1.0)):
        schedule.move_to(position, scale)
        assert optimizer.param_groups[0]["lr"] is held
        assert schedule.rates == pytest.approx([scale * 0.5 * 0.93**position, scale * 0.25 * 0.93**position], rel=1e-12)


def test_a_rank_that_begins_further_on_is_not_warned() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "The epoch parameter")  # torch 2.8's own word to itself
        schedule = Schedule(MAKERS["warm-up, then cosine"], two_groups(), LENGTH)
        schedule.move_to(9)
        schedule.move_to(10)
    assert schedule.plain == plain_rates(MAKERS["warm-up, then cosine"])[10]
