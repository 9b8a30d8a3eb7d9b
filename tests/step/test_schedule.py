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


@pytest.mark.parametrize("make", [lr_scheduler.ReduceLROnPlateau, lambda opt: None])
def test_a_scheduler_that_is_no_function_of_progress_is_refused(make: object) -> None:
    with pytest.raises(InputError, match="progress alone"):
        Schedule(make, sgd(), 10)  # type: ignore[arg-type]
