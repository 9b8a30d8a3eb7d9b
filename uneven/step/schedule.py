"""A torch LR scheduler whose rates are a function of the slot instead of local steps, times a scale.

ReduceLROnPlateau is stepped by `step_metric` instead, with a metric that all ranks know: they all keep the same rates.

A scheduler's state is saved as plain JSON, bit by bit. All of torch's own have a plain state; functions of LambdaLR,
MultiplicativeLR and CyclicLR are not in it, as in torch. What has none: a scheduler of the user's own, or a callable
object in one of these, that keeps another object (a generator, a model). Such a scheduler is stepped through again.
"""

import inspect
import json
import math
import warnings
import zlib
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from uneven.errors import InputError

RATE = "lr"
OTHERS = ("momentum", "betas")  # what OneCycleLR and CyclicLR change besides the rates
KIND = "_kind"  # marks a value that JSON has no form for
LARGEST = 64  # numbers of a tensor: rates, not data
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
        if self._scheduler is None and scale == self._scale and self.rates == self._written:
            self._position = position
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

        The scheduler gets its state and is not stepped, unless that state is no JSON. False
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
        self._position = position
        self._scale = float(state["scale"])
        self.plain = list(state["plain"])
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


class RateTable:
    """What a torch scheduler has set at every position it has passed: learning rates, momentum or betas.

    Schedulers go forwards only, and many of them compute a rate from the one before. The table gives a position that is
    asked for again its own values, whatever the scheduler has done since.

    Invariant: a setting's rows hold from their `start` up to the next one's; equal neighbours are one row.

    So a setting that never changes costs one row, and one that changes at every position 8 bytes a number.
    """

    def __init__(self, position: int, values: Sequence[float]) -> None:
        self._width = len(values)
        self._starts = array("q", [position])
        self._values = array("d", values)

    def at(self, position: int) -> list[float]:
        row = bisect_right(self._starts, position) - 1
        assert row >= 0, f"position {position} of the schedule lies before {self._starts[0]}, the first that was kept"
        return self._row(row)

    def add(self, position: int, values: Sequence[float]) -> None:
        """The values from this position on; it lies after all others."""
        if list(values) != self._row(len(self._starts) - 1):
            self._starts.append(position)
            self._values.extend(values)

    def replace_from(self, position: int, changes: Mapping[int, float]) -> None:
        """Set single numbers, by their place in the row, at this position and all later ones."""
        row = bisect_right(self._starts, position) - 1
        if self._starts[row] != position:
            self._starts.insert(row + 1, position)
            self._values[(row + 1) * self._width : (row + 1) * self._width] = array("d", self._row(row))
            row += 1
        for later in range(row, len(self._starts)):
            for place, value in changes.items():
                self._values[later * self._width + place] = value

    def to_json(self, first: int) -> list[list[float]]:
        """Rows of [start, *values]: what holds at position `first` and later."""
        row = max(0, bisect_right(self._starts, first) - 1)
        return [[max(first, self._starts[place]), *self._row(place)] for place in range(row, len(self._starts))]

    @classmethod
    def from_json(cls, rows: Sequence[Sequence[float]]) -> "RateTable":
        table = cls(int(rows[0][0]), rows[0][1:])
        for start, *values in rows[1:]:
            table.add(int(start), values)
        return table

    def _row(self, place: int) -> list[float]:
        return self._values[place * self._width : (place + 1) * self._width].tolist()


def has_numbers(optimizer: Optimizer, name: str) -> bool:
    """Whether the setting is one, or several, in every param group that has it: some optimizers take betas of None."""
    found = [number for group in optimizer.param_groups for number in _numbers(group, name)]
    return bool(found) and all(isinstance(number, int | float | Tensor) for number in found)


def read_setting(optimizer: Optimizer, name: str) -> list[float]:
    """The numbers of a setting of all param groups in order; a group may have none or, as betas, several."""
    return [float(number) for group in optimizer.param_groups for number in _numbers(group, name)]


def write_setting(optimizer: Optimizer, name: str, values: Sequence[float]) -> None:
    """The reverse of `read_setting`. A tensor is filled in place (a captured step reads it); equal values stay."""
    left = iter(values)
    for group in optimizer.param_groups:
        old = _numbers(group, name)
        new = [next(left) for _ in old]
        for number, value in zip(old, new, strict=True):
            if isinstance(number, Tensor):
                number.fill_(value)
        if any(not isinstance(one, Tensor) and float(one) != value for one, value in zip(old, new, strict=True)):
            whole = [one if isinstance(one, Tensor) else value for one, value in zip(old, new, strict=True)]
            group[name] = type(group[name])(whole) if isinstance(group[name], tuple | list) else whole[0]


def _numbers(group: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = group.get(name)
    if isinstance(value, tuple | list):
        return value
    return [] if value is None else [value]


class _NotPlainError(Exception):
    """A value that cannot be written as JSON."""


def plain_state(scheduler: LRScheduler) -> Any:
    """The scheduler's state_dict as JSON; None where that cannot be."""
    try:
        return _to_plain(scheduler.state_dict())
    except (_NotPlainError, AttributeError, TypeError, RecursionError):  # torch itself fails on some callables
        return None


def load_plain_state(scheduler: LRScheduler, state: Any) -> None:
    """Give a scheduler, made in the same way, a state that `plain_state` has returned."""
    scheduler.load_state_dict(_from_plain(state))


def _to_plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {KIND: "float", "value": repr(float(value))}
    if isinstance(value, Tensor) and value.numel() <= LARGEST and value.is_floating_point():
        name = str(value.dtype).removeprefix("torch.")
        return {KIND: "tensor", "dtype": name, "value": _to_plain(value.detach().double().tolist())}
    if type(value) is list:
        return [_to_plain(one) for one in value]
    if type(value) is tuple:
        return {KIND: "tuple", "value": [_to_plain(one) for one in value]}
    if type(value) in (dict, Counter):
        if type(value) is dict and KIND not in value and all(isinstance(key, str) for key in value):
            return {key: _to_plain(one) for key, one in value.items()}
        pairs = [[_to_plain(key), _to_plain(one)] for key, one in value.items()]
        return {KIND: type(value).__name__.lower(), "value": pairs}
    raise _NotPlainError


def _from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_plain(one) for one in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(KIND)
    if kind is None:
        return {key: _from_plain(one) for key, one in value.items()}
    if kind == "float":
        return float(value["value"])
    if kind == "tensor":
        return torch.tensor(_from_plain(value["value"]), dtype=getattr(torch, value["dtype"]))
    if kind == "tuple":
        return tuple(_from_plain(value["value"]))
    pairs = {_from_plain(key): _from_plain(one) for key, one in value["value"]}
    return Counter(pairs) if kind == "counter" else pairs


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
