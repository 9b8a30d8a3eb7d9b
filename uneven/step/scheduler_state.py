"""The state of a torch scheduler as plain JSON and back, bit by bit; None where it holds what JSON cannot.

All of torch's own schedulers have a plain state; functions of LambdaLR, MultiplicativeLR and CyclicLR are not in it,
as in torch. What has none: a scheduler of the user's own, or a callable object in one of these, that keeps another
object (a generator, a model). Such a scheduler is stepped through again: see step/schedule.py.
"""

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

KIND = "_kind"  # marks a value that JSON has no form for
LARGEST = 64  # numbers of a tensor: rates, not data


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
