"""A torch LR scheduler that is stepped by global progress instead of local steps, times a scale.

ReduceLROnPlateau is stepped by `step_metric` instead, with a metric that all ranks know: they all keep the same rates.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from uneven.errors import InputError


class Schedule:
    """Sets the optimizer's learning rates to a position of the schedule; positions only increase.

    Schedulers compute a rate from the previous one, so the scale is removed before they step and applied afterwards.
    """

    def __init__(self, make_scheduler: Callable[..., Any] | None, optimizer: Optimizer, schedule_length: int) -> None:
        self._optimizer = optimizer
        self._position = 0
        self._scheduler: LRScheduler | None = None
        self._plateau: ReduceLROnPlateau | None = None
        self._scale = 1.0
        self.plain = self.rates  # without the scale
        self._written = self.rates
        if make_scheduler is None:
            return
        has_length = takes_length(make_scheduler)
        made = make_scheduler(optimizer, schedule_length) if has_length else make_scheduler(optimizer)
        if isinstance(made, ReduceLROnPlateau):
            self._plateau = made
        elif isinstance(made, LRScheduler):
            self._scheduler = made
        else:
            raise InputError(
                f"scheduler made a {type(made).__name__}; it must make a torch LRScheduler: "
                "LambdaLR, MultiStepLR, OneCycleLR, ReduceLROnPlateau, ..."
            )
        self.plain = self._written = self.rates

    @property
    def needs_metric(self) -> bool:
        """Whether the rates follow a metric, which `step_metric` must be given."""
        return self._plateau is not None

    def step_metric(self, metric: float) -> None:
        """Step a ReduceLROnPlateau by an evaluated metric, the same on all ranks; its rates count from now on."""
        if self._plateau is None:
            raise InputError("a metric was given to a run without scheduler=lambda optimizer: ReduceLROnPlateau(...)")
        self._remove_scale()
        self._plateau.step(metric)
        self._apply_scale(self._scale)

    def move_to(self, position: int, scale: float = 1.0) -> None:
        """Set the learning rates for this position (global samples // slot size), times the scale."""
        if self._scheduler is None and scale == 1.0 and self.plain == self._written:
            return
        self._remove_scale()
        if self._scheduler is not None:
            with _no_order_warning() if self._position == 0 else nullcontext():
                for _ in range(position - self._position):
                    self._scheduler.step()
        self._position = max(position, self._position)
        self._apply_scale(scale)

    @property
    def rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def _remove_scale(self) -> None:
        # A rate other than the one written here was set by the user: it replaces the schedule's.
        pairs = zip(self.rates, self._written, self.plain, strict=True)
        self._write([plain if rate == written else rate for rate, written, plain in pairs])

    def _apply_scale(self, scale: float) -> None:
        self._scale, self.plain = scale, self.rates
        self._write([scale * rate for rate in self.plain])
        self._written = self.rates

    def _write(self, rates: list[float]) -> None:
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)  # a captured step reads this tensor
            elif float(group["lr"]) != rate:
                group["lr"] = rate


@contextmanager
def _no_order_warning() -> Iterator[None]:
    """A rank's first slot may be a later one, and torch warns of schedulers that step before the optimizer."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step\(\)` before")
        yield


def takes_length(make_scheduler: Callable[..., Any]) -> bool:
    """Whether it is called as scheduler(optimizer, total_steps)."""
    return required_arguments(make_scheduler) == 2


def required_arguments(function: Callable[..., Any]) -> int:
    return sum(
        parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        for parameter in inspect.signature(function).parameters.values()
    )
