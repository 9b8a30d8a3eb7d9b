"""What was passed for the functions and data sets of a task, and in one line what to pass instead. Imports no torch.

Called by `check_task` before anything starts. What the functions return is checked where they are called: models and
optimizers in train/built.py, losses in step/loss.py, metrics in step/evaluation.py.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

from uneven.errors import InputError

# name -> (how it is called, what to pass)
FUNCTIONS = {
    "model": ("model()", "model=lambda: Net(...), or the class itself"),
    "optimizer": ("optimizer(params)", "optimizer=lambda params: torch.optim.Adam(params, lr=1e-3)"),
    "step": ("step(model, batch)", "step=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])"),
    "scheduler": (
        "scheduler(optimizer) or scheduler(optimizer, total_steps)",
        "scheduler=lambda optimizer, total_steps: CosineAnnealingLR(optimizer, total_steps)",
    ),
    "eval_step": (
        "eval_step(model, batch)",
        "evaluate=(test_set, eval_step), where eval_step(model, batch) returns ({'correct': number}, count)",
    ),
}


def check_function(name: str, value: Any, *counts: int) -> None:
    """InputError unless `value` can be called with one of these numbers of arguments."""
    called, example = FUNCTIONS[name]
    wanted = f"{name} must be a function" + (" that makes the model" if name == "model" else "")
    if not callable(value):
        raise InputError(f"{wanted}, got {_shown(value)}: pass {example}")
    if is_module(value) or (isinstance(value, type) and name in ("step", "eval_step")):
        kind = f"the class {value.__name__}" if isinstance(value, type) else f"the module {type(value).__name__}"
        raise InputError(f"{wanted}, got {kind}, and is called as {called}: pass {example}")
    if not any(_takes(value, count) for count in counts):
        shown = getattr(value, "__name__", type(value).__name__)
        raise InputError(f"{name}={shown} cannot be called as {called}: pass {example}")


def check_evaluate(evaluate: Any) -> None:
    """InputError unless it is a pair of a data set and a function."""
    if not isinstance(evaluate, tuple | list) or len(evaluate) != 2:
        raise InputError(f"evaluate must be a pair, got {_shown(evaluate)}: pass {FUNCTIONS['eval_step'][1]}")
    first, second = evaluate
    if callable(first) and hasattr(second, "__getitem__"):
        raise InputError(f"evaluate is (function, data set), the wrong way round: pass {FUNCTIONS['eval_step'][1]}")


def check_data(name: str, dataset: Any) -> None:
    """InputError for what is often passed in place of a data set; whether it has a length is the caller's question."""
    kind = type(dataset).__name__
    if dataset is None:
        raise InputError(f"{name} is missing, got NoneType: pass {name}=TensorDataset(X, Y), or a map-style data set")
    if isinstance(dataset, type):
        raise InputError(f"{name} is the class {dataset.__name__}, not a data set: pass {name}={dataset.__name__}(...)")
    if isinstance(dataset, str | bytes | PathLike):
        raise InputError(f"{name}={dataset!r} is a name, not a data set: load it first, and pass the object")
    if isinstance(dataset, Mapping) and not isinstance(next(iter(dataset), None), Mapping):  # a TensorDict gives rows
        example = (
            f"TensorDataset({', '.join(map(str, dataset))})" if _are_arrays([*dataset.values()]) else "one of them"
        )
        raise InputError(f"{name} is a {kind} with the keys {', '.join(map(repr, dataset))}: pass {name}={example}")
    if hasattr(dataset, "iloc"):
        raise InputError(f"{name} is a {kind}, whose columns are indexed by name: pass TensorDataset of its values")
    if _is_columns(dataset):
        raise InputError(
            f"{name} is a {kind} of {len(dataset)} arrays, not of samples: pass {name}=TensorDataset(X, Y), or "
            "uneven.TensorData(X, Y)"
        )
    if isinstance(dataset, Iterator) or inspect.isfunction(dataset):
        raise InputError(f"{name} is a {kind}, which has no length and no index: pass a list or a map-style data set")


def is_module(value: Any) -> bool:
    """Whether it is a model or layer itself, not a function that makes one."""
    return not isinstance(value, type) and hasattr(value, "named_parameters")


def _takes(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


def _is_columns(value: Any) -> bool:
    """Whether it is (X, Y) as arrays of one length: taken as a data set it would have two samples."""
    if not isinstance(value, tuple | list) or not value or not _are_arrays(value):
        return False
    lengths = {entry.shape[0] if len(entry.shape) else None for entry in value}
    if None in lengths or len(lengths) > 1:
        return isinstance(value, tuple)
    # A list of equal arrays may be samples; inputs and targets differ.
    return isinstance(value, tuple) or len({(tuple(entry.shape), str(entry.dtype)) for entry in value}) > 1


def _are_arrays(values: Sequence[Any]) -> bool:
    return all(hasattr(value, "shape") and hasattr(value, "dtype") for value in values)


def _shown(value: Any) -> str:
    kind = type(value).__name__
    return f"{kind} {value!r}" if isinstance(value, str | int | float) else kind
