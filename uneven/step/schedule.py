"""A torch LR scheduler whose rates are a function of the slot instead of local steps, times a scale.

ReduceLROnPlateau is stepped by `step_metric` instead, with a metric that all ranks know: they all keep the same rates.
"""

import inspect
import json
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from uneven.errors import InputError
from uneven.step.rate_table import OTHERS, RATE, RateTable, has_numbers, read_setting, write_setting
from uneven.step.scheduler_state import load_plain_state, plain_state

ADDED = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")  # what schedulers keep in param groups


class Schedule:
    """Sets the optimizer's learning rates, and what else its scheduler changes, to those of a position.

    The torch scheduler is stepped forwards only, when a position is asked for first, and its values are kept in a
    table: a position that is asked for again or out of order gets its own. Schedulers compute a rate from the previous
    one, so before they step the optimizer holds the last values without the scale.
    """

    def __init__(
        self,
        make_scheduler: Callable[..., Any] | None,
        optimizer: Optimizer,
        schedule_length: int,
        *,
        is_by_epoch: bool = False,
    ) -> None:
        """Positions are steps, or epochs: a state of the one is none of the other."""
        self._optimizer = optimizer
        self._position = 0  # that the optimizer's values are for
        self._front = 0  # that the scheduler was stepped to
        self._scheduler: LRScheduler | None = None
        self._plateau: ReduceLROnPlateau | None = None
        self._has_stepped = False  # by this object
        self._scale = 1.0
        self._length = schedule_length
        has_length = make_scheduler is not None and takes_length(make_scheduler)
        if make_scheduler is not None:
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
        self.plain = self._written = self.rates  # `plain`: without the scale
        self._rates = RateTable(0, self.plain)
        self._others = {
            name: RateTable(0, read_setting(optimizer, name)) for name in OTHERS if has_numbers(optimizer, name)
        }
        self._changed: set[str] = set()  # those of them that the scheduler has changed: the rest is the user's
        self._added = [{key: group[key] for key in ADDED if key in group} for group in optimizer.param_groups]
        self._made = self._describe(schedule_length if has_length else None, is_by_epoch)

    @property
    def scheduler(self) -> LRScheduler | None:
        """The one that follows positions."""
        return self._scheduler

    @property
    def needs_metric(self) -> bool:
        """Whether the rates follow a metric, which `step_metric` must be given."""
        return self._plateau is not None

    @property
    def is_constant(self) -> bool:
        """Whether every position has the rates that the optimizer holds, without a scale."""
        return self._scheduler is None and self.plain == self._written

    def step_metric(self, metric: float) -> None:
        """Step a ReduceLROnPlateau by an evaluated metric, the same on all ranks; its rates count from now on."""
        if self._plateau is None:
            raise InputError("a metric was given to a run without scheduler=lambda optimizer: ReduceLROnPlateau(...)")
        self._take_own_rates()
        self._write(self.plain)
        self._plateau.step(metric)
        self._apply(self.rates, self._scale)

    def move_to(self, position: int, scale: float = 1.0) -> None:
        """Set the learning rates for this position (the slots before it), times the scale."""
        if scale == 1.0 and self.is_constant:
            return
        self._take_own_rates()
        plain = self.plain
        if self._scheduler is not None:
            if position > self._front:
                self._step_to(position)
            elif position != self._position:
                self._write_others(position)
            plain = self._rates.at(position)
        self._position = position
        self._apply(plain, scale)

    @property
    def rates(self) -> list[float]:
        """Of all param groups in order; one whose optimizer finds its own rate has none (lr=None, as an Adafactor)."""
        return read_setting(self._optimizer, RATE)

    @property
    def first_rate(self) -> float | None:
        return next(iter(self.rates), None)

    def state_dict(self, first_needed: int | None = None) -> dict[str, Any]:
        """What a run needs to go on from here, as plain JSON.

        `first_needed`: the first position that may be asked for again; by default the last one that was set.
        """
        first = self._position if first_needed is None else min(first_needed, self._position)
        scheduler = self._scheduler or self._plateau
        tables = {RATE: self._rates, **{name: self._others[name] for name in OTHERS if name in self._changed}}
        return {
            "made": self._made,
            "position": self._position,
            "front": self._front,
            "scale": self._scale,
            "plain": self.plain,
            "written": self._written,
            "rates": self.rates,
            "scheduler": None if scheduler is None else plain_state(scheduler),
            "table": {name: table.to_json(first) for name, table in tables.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Go on where `state_dict` was taken, with the same rates bit by bit; before the first step of this run.

        The scheduler gets its state and is not stepped, unless that state is no JSON (step/scheduler_state.py). False
        where this run's optimizer or scheduler was made with other numbers (another length, rate, kind): then nothing
        is loaded, and the rates are those of the new one at the saved position.
        """
        if state["made"] != self._made:
            self._restart(min(int(state["position"]), self._length), float(state["scale"]))
            return False
        scheduler, position = self._scheduler or self._plateau, int(state["position"])
        if scheduler is not None and state["scheduler"] is not None:
            load_plain_state(scheduler, state["scheduler"])
            self._front = int(state["front"])
        else:
            self._restart(int(state["front"]), 1.0)
        tables = {name: RateTable.from_json(rows) for name, rows in state["table"].items()}
        self._rates = tables.pop(RATE)
        self._others.update(tables)
        self._changed.update(tables)
        self._write_others(position)
        self._position, self._scale, self.plain = position, float(state["scale"]), list(state["plain"])
        self._write(state["rates"])  # a rate that the user set after the last step is still found
        self._written = list(state["written"])
        return True

    def _describe(self, length: int | None, is_by_epoch: bool) -> str:
        """Equal for schedules that were made alike; of the functions in them only what torch keeps."""
        scheduler = self._scheduler or self._plateau
        state = None if scheduler is None else plain_state(scheduler)
        added = [{key: float(value) for key, value in settings.items()} for settings in self._added]
        made = [type(scheduler).__name__, length, self.plain, added, state, *(["epoch"] if is_by_epoch else [])]
        text = json.dumps(made, sort_keys=True)
        return f"{zlib.crc32(text.encode()):08x}"

    def _restart(self, position: int, scale: float) -> None:
        """Step a scheduler that was just made to this position, whatever the optimizer holds by now."""
        self._apply(self._rates.at(0), 1.0)
        for group, settings in zip(self._optimizer.param_groups, self._added, strict=True):
            group.update(settings)
        self.move_to(position, scale)

    def _take_own_rates(self) -> None:
        """A rate other than the one written here was set by the user: it replaces the schedule's from here on."""
        rates = self.rates
        changes = {
            place: rate
            for place, (rate, written) in enumerate(zip(rates, self._written, strict=True))
            if rate != written
        }
        if changes:
            self.plain = [changes.get(place, plain) for place, plain in enumerate(self.plain)]
            self._rates.replace_from(self._position, changes)

    def _step_to(self, position: int) -> None:
        assert self._scheduler is not None, "nothing to step"
        self._write(self._rates.at(self._front))
        if self._position != self._front:
            self._write_others(self._front)
        before = {name: read_setting(self._optimizer, name) for name in self._others}
        with nullcontext() if self._has_stepped else _no_order_warning():
            while self._front < position:
                self._scheduler.step()
                self._front += 1
                self._rates.add(self._front, self.rates)
                for name, table in self._others.items():
                    values = read_setting(self._optimizer, name)
                    if values != before[name]:
                        table.add(self._front, values)
                        self._changed.add(name)
                        before[name] = values
        self._has_stepped = True

    def _apply(self, plain: list[float], scale: float) -> None:
        self._scale, self.plain = scale, plain
        self._write([scale * rate for rate in plain])
        self._written = self.rates

    def _write(self, rates: Sequence[float]) -> None:
        write_setting(self._optimizer, RATE, rates)

    def _write_others(self, position: int) -> None:
        for name in self._changed:
            write_setting(self._optimizer, name, self._others[name].at(position))


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
