"""A torch LR scheduler, stepped by global progress instead of by local steps."""

import inspect
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from uneven.errors import InputError


class Schedule:
    """Keeps the optimizer's learning rates at a position of the schedule; positions only grow."""

    def __init__(self, make_scheduler: Callable[..., Any] | None, optimizer: Optimizer, schedule_length: int) -> None:
        self._optimizer = optimizer
        self._position = 0
        self._scheduler: LRScheduler | None = None
        if make_scheduler is None:
            return
        takes_length = _required_arguments(make_scheduler) == 2
        made = make_scheduler(optimizer, schedule_length) if takes_length else make_scheduler(optimizer)
        if isinstance(made, ReduceLROnPlateau) or not isinstance(made, LRScheduler):
            raise InputError(
                f"scheduler made a {type(made).__name__}; it must make a torch LRScheduler that "
                "depends on progress alone, not on a metric: LambdaLR, MultiStepLR, OneCycleLR, ..."
            )
        self._scheduler = made

    def move_to(self, position: int) -> None:
        """Set the learning rates for this position (global samples // slot size)."""
        if self._scheduler is not None:
            for _ in range(position - self._position):
                self._scheduler.step()
        self._position = max(position, self._position)

    @property
    def rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]


def _required_arguments(function: Callable[..., Any]) -> int:
    return sum(
        parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        for parameter in inspect.signature(function).parameters.values()
    )
