"""A torch LR scheduler that is stepped by global progress instead of local steps, times a scale."""

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

    def __init__(
        self,
        make_scheduler: Callable[..., Any] | None,
        optimizer: Optimizer,
        schedule_length: int,
        *,
        takes_metric: bool = False,
    ) -> None:
        """`takes_metric`: the caller calls `step_metric`, which ReduceLROnPlateau needs."""
        self._optimizer = optimizer
        self._plateau: ReduceLROnPlateau | None = None
        self._position = 0
        self._scheduler: LRScheduler | None = None
        self.plain = self.rates  # without the scale
        self._written = self.rates
        if make_scheduler is None:
            return
        takes_length = required_arguments(make_scheduler) == 2
        made = make_scheduler(optimizer, schedule_length) if takes_length else make_scheduler(optimizer)
        if isinstance(made, ReduceLROnPlateau) and takes_metric:
            self._plateau = made
            return
        if isinstance(made, ReduceLROnPlateau) or not isinstance(made, LRScheduler):
            raise InputError(
                f"scheduler made a {type(made).__name__}; it must make a torch LRScheduler that "
                "depends on progress alone, not on a metric: LambdaLR, MultiStepLR, OneCycleLR, ..."
            )
        self._scheduler = made
        self.plain = self._written = self.rates

    def move_to(self, position: int, scale: float = 1.0) -> None:
        """Set the learning rates for this position (global samples // slot size), times the scale."""
        if self._scheduler is None and scale == 1.0 and self.plain == self._written:
            return
        now = self.rates
        # A rate other than the one written here was set by the user: it replaces the schedule's.
        pairs = zip(now, self._written, self.plain, strict=True)
        self._write([plain if rate == written else rate for rate, written, plain in pairs])
        if self._scheduler is not None:
            with _no_order_warning() if self._position == 0 else nullcontext():
                for _ in range(position - self._position):
                    self._scheduler.step()
        self._position = max(position, self._position)
        self.plain = self.rates
        self._write([scale * rate for rate in self.plain])
        self._written = self.rates

    def step_metric(self, metric: float) -> None:
        """Step a ReduceLROnPlateau by an evaluated metric; the same on all ranks."""
        if self._plateau is None:
            raise InputError("a metric was given to a run without scheduler=lambda optimizer: ReduceLROnPlateau(...)")
        scale = [rate / plain if plain else 1.0 for rate, plain in zip(self._written, self.plain, strict=True)]
        self._write(self.plain)
        self._plateau.step(metric)
        self.plain = self.rates
        self._write([factor * rate for factor, rate in zip(scale, self.plain, strict=True)])
        self._written = self.rates

    @property
    def rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

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


def required_arguments(function: Callable[..., Any]) -> int:
    return sum(
        parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        for parameter in inspect.signature(function).parameters.values()
    )
