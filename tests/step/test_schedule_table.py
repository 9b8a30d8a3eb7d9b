"""Rates as a function of the position: out of order, again, and in a run that was resumed."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from uneven.step.schedule import RateTable, Schedule

LENGTH = 24
Optimizer = torch.optim.Optimizer


class Decay:
    """A callable object: torch keeps its attributes in the scheduler's state."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, step: int) -> float:
        return self.rate**step


class Unwritable(Decay):
    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        self.held = object()


def warm_up_then_cosine(opt: Optimizer) -> LRScheduler:
    parts = [lr_scheduler.LinearLR(opt, 0.1, 1.0, 5), lr_scheduler.CosineAnnealingLR(opt, LENGTH)]
    return lr_scheduler.SequentialLR(opt, parts, [5])


def chained(opt: Optimizer) -> LRScheduler:
    return lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(opt, 0.1, 7), lr_scheduler.ExponentialLR(opt, 0.9)])


MAKERS: dict[str, Callable[..., Any]] = {
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 7, gamma=0.3),
    "MultiStepLR": lambda opt: lr_scheduler.MultiStepLR(opt, [3, 3, 15], gamma=0.1),
    "ConstantLR": lambda opt: lr_scheduler.ConstantLR(opt, 0.5, 9),
    "LinearLR": lambda opt: lr_scheduler.LinearLR(opt, 0.1, 1.0, 11),
    "ExponentialLR": lambda opt: lr_scheduler.ExponentialLR(opt, 0.93),
    "PolynomialLR": lambda opt: lr_scheduler.PolynomialLR(opt, 18, 1.7),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, LENGTH, eta_min=1e-3),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 3, 2),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, [0.01, 0.02], [0.1, 0.3], 4, 7),
    "CyclicLR exp_range": lambda opt: lr_scheduler.CyclicLR(opt, 0.01, 0.1, 4, mode="exp_range", gamma=0.9),
    "OneCycleLR": lambda opt, steps: lr_scheduler.OneCycleLR(opt, [0.7, 0.2], total_steps=steps),
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step)),
    "LambdaLR of an object": lambda opt: lr_scheduler.LambdaLR(opt, Decay(0.9)),
    "MultiplicativeLR": lambda opt: lr_scheduler.MultiplicativeLR(opt, lambda step: 0.9 + 0.01 * (step % 3)),
    "SequentialLR": warm_up_then_cosine,
    "ChainedScheduler": chained,
}
FALLBACK: dict[str, Callable[..., Any]] = {
    "LambdaLR of an object that holds another": lambda opt: lr_scheduler.LambdaLR(opt, Unwritable(0.9)),
}
every_scheduler = pytest.mark.parametrize("make", [*MAKERS.values(), *FALLBACK.values()], ids=[*MAKERS, *FALLBACK])


def two_groups(kind: Any = torch.optim.SGD, **rest: Any) -> Optimizer:
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in (0.1, 0.03)]
    return kind(groups, lr=1.0, **({"momentum": 0.9} if kind is torch.optim.SGD else {}), **rest)  # type: ignore[no-any-return]


def values(optimizer: Optimizer) -> list[Any]:
    return [[float(group["lr"]), group.get("momentum"), group.get("betas")] for group in optimizer.param_groups]


def plain_values(make: Callable[..., Any], optimizer: Optimizer, length: int = LENGTH) -> list[Any]:
    """What torch alone sets, position by position."""
    scheduler = make(optimizer, length) if make is MAKERS["OneCycleLR"] else make(optimizer)
    found = []
    for _ in range(length):
        found.append(values(optimizer))
        optimizer.step()
        scheduler.step()
    return found


def counted(schedule: Schedule) -> list[int]:
    """The steps that its torch scheduler takes from now on."""
    steps: list[int] = []
    scheduler = schedule._scheduler
    assert scheduler is not None
    step = scheduler.step
    scheduler.step = lambda: (steps.append(1), step())[-1]  # type: ignore[method-assign,func-returns-value]
    return steps


@every_scheduler
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_position_has_its_own_values_in_any_order(make: Callable[..., Any], kind: Any) -> None:
    expected, optimizer = plain_values(make, two_groups(kind)), two_groups(kind)
    schedule = Schedule(make, optimizer, LENGTH)
    steps = counted(schedule)
    for position in (3, 0, 0, 9, 8, 9, 10, 2, 23, 11, 23, 1):
        schedule.move_to(position)
        assert values(optimizer) == expected[position]
        assert schedule.plain == [rate for rate, *_ in expected[position]]
        optimizer.step()
    assert len(steps) == 23, "a scheduler goes forwards only, and no farther than asked"


def test_the_scale_enters_no_position() -> None:
    expected = plain_values(MAKERS["ExponentialLR"], two_groups())
    optimizer = two_groups()
    schedule = Schedule(MAKERS["ExponentialLR"], optimizer, LENGTH)
    for position, scale in ((5, 2.0), (2, 3.0), (9, 1.5), (5, 1.0), (10, 0.5)):
        schedule.move_to(position, scale)
        assert schedule.rates == [scale * rate for rate, *_ in expected[position]]


def test_a_rate_set_by_hand_counts_from_its_position_on_and_not_before() -> None:
    optimizer, plain = two_groups(), plain_values(MAKERS["ExponentialLR"], two_groups())
    schedule = Schedule(MAKERS["ExponentialLR"], optimizer, LENGTH)
    schedule.move_to(8, 2.0)
    schedule.move_to(5, 2.0)
    optimizer.param_groups[0]["lr"] = 7.0
    schedule.move_to(6, 2.0)
    assert schedule.plain == [7.0, plain[6][1][0]]
    schedule.move_to(4, 2.0)
    assert schedule.plain == [plain[4][0][0], plain[4][1][0]]
    schedule.move_to(9, 2.0)
    assert schedule.plain == [7.0 * 0.93, plain[9][1][0]]


def test_momentum_that_the_scheduler_leaves_alone_is_the_users() -> None:
    optimizer = two_groups()
    schedule = Schedule(MAKERS["StepLR"], optimizer, LENGTH)
    for position in (4, 9, 2, 10, 3):
        optimizer.param_groups[0]["momentum"] = 0.01 * position
        schedule.move_to(position)
        assert optimizer.param_groups[0]["momentum"] == 0.01 * position


def test_rates_in_a_tensor_go_back_in_that_tensor() -> None:
    optimizer = two_groups()
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    held = [group["lr"] for group in optimizer.param_groups]
    schedule = Schedule(MAKERS["ExponentialLR"], optimizer, LENGTH)
    seen = {}
    for position in (0, 3, 7):
        schedule.move_to(position, 1.7)
        seen[position] = schedule.rates
    for position in (3, 0, 7):
        schedule.move_to(position, 1.7)
        assert schedule.rates == seen[position]
    assert all(group["lr"] is tensor for group, tensor in zip(optimizer.param_groups, held, strict=True))


# In a run that was resumed


SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW


@every_scheduler
@pytest.mark.parametrize(
    ("kind", "scale", "stop"), [(SGD, 1.0, 0), (SGD, 1.7, 3), (ADAMW, 1.7, 5), (SGD, 1.7, 14), (ADAMW, 1.0, 14)]
)
def test_a_resumed_run_goes_on_bit_by_bit(make: Callable[..., Any], kind: Any, scale: float, stop: int) -> None:
    optimizer, again = two_groups(kind), two_groups(kind)
    schedule = Schedule(make, optimizer, LENGTH)
    schedule.move_to(stop, scale)
    optimizer.step()
    state = json.loads(json.dumps(schedule.state_dict(), allow_nan=False))
    new = Schedule(make, again, LENGTH)
    again.load_state_dict(optimizer.state_dict())
    steps = counted(new)
    assert new.load_state_dict(state)
    is_plain = make in MAKERS.values()
    assert len(steps) == (0 if is_plain else stop)
    for position in (stop, stop + 1, stop + 2, 20, 19, 23):
        schedule.move_to(position, scale)
        new.move_to(position, scale)
        assert values(again) == values(optimizer)
        assert new.plain == schedule.plain
        optimizer.step()
        again.step()
    assert len(steps) == (23 - stop if is_plain else 23)


@pytest.mark.parametrize("name", ["OneCycleLR", "ExponentialLR", "MultiStepLR"])
def test_gaps_before_the_stop_have_their_own_values_after_it(name: str) -> None:
    expected = plain_values(MAKERS[name], two_groups())
    schedule = Schedule(MAKERS[name], two_groups(), LENGTH)
    schedule.move_to(12)
    state = json.loads(json.dumps(schedule.state_dict(first_needed=4)))
    optimizer = two_groups()
    new = Schedule(MAKERS[name], optimizer, LENGTH)
    steps = counted(new)
    assert new.load_state_dict(state)
    for position in (4, 7, 5, 12, 14, 6):
        new.move_to(position)
        assert values(optimizer) == expected[position]
    assert len(steps) == 2
    with pytest.raises(AssertionError, match="before 4, the first that was kept"):
        new.move_to(3)


def test_a_plateau_goes_on() -> None:
    def make(opt: Optimizer) -> LRScheduler:
        return lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=1)

    for stop in range(6):
        optimizer, again = two_groups(), two_groups()
        schedule, new = Schedule(make, optimizer, LENGTH), Schedule(make, again, LENGTH)
        metrics = [3.0, 2.0, 2.0, 2.0, 2.5, 2.5, 2.5]
        for position, metric in enumerate(metrics[:stop]):
            schedule.move_to(position, 1.5)
            schedule.step_metric(metric)
        assert new.load_state_dict(json.loads(json.dumps(schedule.state_dict(), allow_nan=False)))
        for position, metric in enumerate(metrics[stop:], stop):
            for one in (schedule, new):
                one.move_to(position, 1.5)
                one.step_metric(metric)
            assert new.rates == schedule.rates
            assert new.plain == schedule.plain
        assert schedule.plain[0] < 0.1, "the rate has fallen"


@pytest.mark.parametrize("make", [None, MAKERS["ExponentialLR"], FALLBACK["LambdaLR of an object that holds another"]])
@pytest.mark.parametrize("is_seen", [False, True])
def test_a_rate_set_by_hand_is_kept(make: Callable[..., Any] | None, is_seen: bool) -> None:
    optimizer, again = two_groups(), two_groups()
    schedule, new = Schedule(make, optimizer, LENGTH), Schedule(make, again, LENGTH)
    schedule.move_to(3, 1.5)
    optimizer.param_groups[0]["lr"] = 0.5
    if is_seen:
        schedule.move_to(3, 1.5)
    assert new.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    assert new.rates == schedule.rates
    for position, scale in ((3, 1.5), (3, 2.0), (4, 2.0), (5, 1.0)):
        schedule.move_to(position, scale)
        new.move_to(position, scale)
        assert new.rates == schedule.rates
        assert new.plain == schedule.plain
    assert make is not None or new.plain == [0.5, 0.03]


def test_a_schedule_of_another_length_is_stepped_to_the_position() -> None:
    make, optimizer = MAKERS["OneCycleLR"], two_groups()
    schedule = Schedule(make, optimizer, LENGTH)
    schedule.move_to(9, 1.5)
    state, saved = schedule.state_dict(), optimizer.state_dict()
    longer = two_groups()
    new = Schedule(make, longer, 2 * LENGTH)
    longer.load_state_dict(saved)  # OneCycleLR keeps its rates in the param groups, too
    steps = counted(new)
    assert not new.load_state_dict(state)
    assert len(steps) == 9
    expected = plain_values(make, two_groups(), 2 * LENGTH)
    assert new.plain == [rate for rate, *_ in expected[9]]
    assert new.rates == [1.5 * rate for rate in new.plain]
    for position in (10, 40):
        new.move_to(position)
        assert values(longer) == expected[position]
    shorter = Schedule(make, two_groups(), 5)
    assert not shorter.load_state_dict(state), "a run that is over already is no error here"


def test_other_numbers_or_another_scheduler_are_a_schedule_of_its_own() -> None:
    schedule = Schedule(MAKERS["ExponentialLR"], two_groups(), LENGTH)
    schedule.move_to(4)
    state = schedule.state_dict()
    for make in (None, lambda opt: lr_scheduler.ExponentialLR(opt, 0.5), MAKERS["StepLR"]):
        optimizer = two_groups()
        new = Schedule(make, optimizer, LENGTH)
        optimizer.load_state_dict(schedule._optimizer.state_dict())
        assert not new.load_state_dict(state)
        expected = [0.1, 0.03] if make is None else [rate for rate, *_ in plain_values(make, two_groups())[4]]
        assert new.rates == expected


def test_the_table_keeps_a_row_for_each_change_alone() -> None:
    table = RateTable(0, [1.0, 2.0])
    for position in range(1, 1000):
        table.add(position, [1.0, 2.0 if position < 500 else 3.0])
    assert table.to_json(0) == [[0, 1.0, 2.0], [500, 1.0, 3.0]]
    assert table.to_json(499) == [[499, 1.0, 2.0], [500, 1.0, 3.0]]
    assert table.to_json(700) == [[700, 1.0, 3.0]]
    table.replace_from(600, {0: 9.0})
    assert [table.at(position) for position in (499, 599, 600)] == [[1.0, 2.0], [1.0, 3.0], [9.0, 3.0]]
    assert RateTable.from_json(table.to_json(0)).to_json(0) == table.to_json(0)
