"""The param groups of a sharded optimizer and of the optimizer inside it, kept alike without overwriting either side.

The user, or a scheduler, changes settings outside; the inner optimizer keeps numbers of its own in its groups (the
step count of a schedule-free optimizer, the estimate of Prodigy) or adds keys later. Only what was changed outside
since the last step is handed down, and what the inner one changed comes up. Handing down everything undid the inner
optimizer's own numbers at every step (params ended 2e-2 off).
"""

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from uneven.comm.gather import gather_json
from uneven.comm.group import Group
from uneven.errors import InputError

PARAMS = "params"  # never handed on: the two sides have different ones


class GroupSettings:
    """Life cycle: `hand_down` before every inner step, `take_up` after it; `add` when both sides have a new group."""

    def __init__(self, outer: Optimizer, inner: Optimizer) -> None:
        self._outer, self._inner = outer.param_groups, inner.param_groups
        self._last: list[dict[str, Any]] = []
        self.add()

    def add(self) -> None:
        self._last += [dict(settings) for settings in self._outer[len(self._last) :]]

    def hand_down(self) -> None:
        for mine, inner, last in zip(self._outer, self._inner, self._last, strict=True):
            changed = {key: value for key, value in mine.items() if key not in last or not _is_same(value, last[key])}
            inner.update({key: value for key, value in changed.items() if key != PARAMS})
            for key in last.keys() - mine.keys():
                inner.pop(key, None)

    def take_up(self) -> None:
        for mine, inner in zip(self._outer, self._inner, strict=True):
            mine.update({key: value for key, value in inner.items() if key != PARAMS})
        self._last = [dict(settings) for settings in self._outer]

    def agree(self, group: Group, name: str) -> None:
        """Compare what the ranks' inner optimizers keep in their groups; a collective, before `take_up`.

        Each rank's optimizer sees its own tensors only. A number that it computes over all of them, as Prodigy its
        distance, then differs: InputError on every rank. A rank without params in a group takes the others' numbers.
        """
        own = [_numbers(settings) if settings[PARAMS] else None for settings in self._inner]
        by_rank = gather_json(group, own)
        for place, settings in enumerate(self._inner):
            held = [(rank, numbers[place]) for rank, numbers in enumerate(by_rank) if numbers[place] is not None]
            for key in dict.fromkeys(key for _, numbers in held for key in numbers):
                _refuse_difference(name, key, [(rank, numbers.get(key)) for rank, numbers in held])
                if not settings[PARAMS]:
                    settings[key] = held[0][1].get(key)


def _numbers(settings: dict[str, Any]) -> dict[str, float | int | bool | str | None]:
    """The plain values of a group; tensors are not compared."""
    return {key: value for key, value in settings.items() if value is None or isinstance(value, int | float | str)}


def _refuse_difference(name: str, key: str, values: Iterable[tuple[int, Any]]) -> None:
    (first_rank, first), *others = values
    for rank, value in others:
        if value != first and not (_is_number(value) and _is_number(first) and _is_close(value, first)):
            raise InputError(
                f"{name} cannot be sharded: it keeps {key!r} in its param groups, and each rank computes another value "
                f"from its own tensors ({first} on rank {first_rank}, {value} on rank {rank}); use strategy="
                "'ddp-bucketed', where every rank has all gradients"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _is_close(value: float, other: float) -> bool:
    """Up to how kinds of devices round; NaN is as good as NaN."""
    return math.isclose(value, other, rel_tol=1e-5) or (math.isnan(value) and math.isnan(other))


def _is_same(value: Any, last: Any) -> bool:
    """A tensor that was changed in place is shared by both sides, so only another object counts."""
    if value is last:
        return True
    if isinstance(value, Tensor) or isinstance(last, Tensor) or type(value) is not type(last):
        return False
    return bool(value == last)
