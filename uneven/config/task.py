"""What to train: the user's factories, train step and data, checked before anything starts. Imports no torch.

What the functions return is checked where they are called: models and optimizers in train/engine.py, losses in
step/loss.py, metrics in step/evaluation.py.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

from uneven.errors import InputError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

TrainStep = Callable[["nn.Module", Any], Any]
HOOKS = ("on_start", "on_step", "on_round", "on_eval", "on_save", "on_end")  # what a callback may have
EvalStep = Callable[["nn.Module", Any], tuple[Mapping[str, Any], int]]
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


@dataclass(frozen=True)
class Loading:
    """How samples become batches, beside the settings batch_size, shuffle, drop_last and num_workers.

    Names and meanings are those of torch's DataLoader, from which data/user_loader.py takes them. A `sampler` or
    `batch_sampler` decides the order of an epoch in place of `shuffle`.
    """

    collate_fn: Callable[[list[Any]], Any] | None = None  # None: torch's default_collate
    sampler: Iterable[int] | None = None
    batch_sampler: Iterable[Sequence[int]] | None = None  # each batch is one slot
    generator: Any = None  # of the DataLoader that the sampler came with: it draws one number an epoch from it
    worker_init_fn: Callable[[int], Any] | None = None
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    timeout: float = 0.0


@dataclass(frozen=True)
class Evaluation:
    """`eval_step(model, batch)` returns sums and a count; a metric is the total sum over the total count."""

    dataset: Any
    eval_step: EvalStep
    every: int | str = 1  # epochs, or as in "500 steps"; the setting eval_every takes precedence
    batch_size: int | None = None
    loading: Loading = Loading()
    num_workers: int = 0


@dataclass(frozen=True)
class Task:
    """The user's factories and data. Each rank calls each factory once."""

    make_model: Callable[[], "nn.Module"]
    make_optimizer: Callable[[Any], "Optimizer"]
    train_step: TrainStep
    dataset: Any
    make_scheduler: Callable[..., Any] | None = None
    evaluation: Evaluation | None = None
    loading: Loading = Loading()
    callbacks: tuple[Any, ...] = ()
    is_own_loop: bool = False  # the user's code calls forward and step: `train_step` returns the loss that it passed
    before_step: Callable[..., Any] | None = None  # (model) or (model, optimizer), with the summed gradients in place
    # What the functions made where the script runs, for ranks to compare with (launch/checks/trial.py).
    made: Mapping[str, Mapping[str, str]] | None = None


def is_stream(dataset: Any) -> bool:
    """Whether a data set is read in order and not by index: an iterable one, or a source with open(shard, start).

    torch's Dataset has a `__getitem__` that only raises, so it is known by its name: no torch here. Other iterators
    than an IterableDataset are no streams: they end after one pass.
    """
    kinds = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}": kind for kind in type(dataset).__mro__}
    if "torch.IterableDataset" in kinds:
        return True
    if "torch.DataLoader" in kinds or isinstance(dataset, type) or hasattr(dataset, "__next__"):
        return False
    indexed = next((name for name, kind in kinds.items() if "__getitem__" in vars(kind)), None)
    if indexed not in (None, "torch.Dataset"):
        return False
    return hasattr(dataset, "__iter__") or callable(getattr(dataset, "open", None))


def check_task(task: Task) -> None:
    """InputError where the task cannot be trained, with the argument and the fix."""
    check_function("model", task.make_model, 0)
    check_function("optimizer", task.make_optimizer, 1)
    check_function("step", task.train_step, 2)
    if task.make_scheduler is not None:
        check_function("scheduler", task.make_scheduler, 1, 2)
    if task.before_step is not None and not callable(task.before_step):
        raise InputError(
            f"before_step must be a function of (model) or (model, optimizer), got {type(task.before_step).__name__}"
        )
    if task.evaluation is not None:
        check_evaluation(task.evaluation)
    _check_dataset("dataset", task.dataset)
    check_callbacks(task.callbacks, task.evaluation is not None)


def check_evaluation(evaluation: Evaluation) -> None:
    """InputError where it cannot be evaluated; also for one that a loop of the user's own asks for between steps."""
    check_function("eval_step", evaluation.eval_step, 2)
    _check_dataset("the test set of evaluate", evaluation.dataset)
    size = evaluation.batch_size
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise InputError(f"evaluate(batch_size={size!r}) must be a whole number of at least 1, or left out")


def _check_dataset(name: str, dataset: Any) -> None:
    check_data(name, dataset)
    if is_stream(dataset):
        return  # data/source.py knows how it is read, and launch/checks/settings.py checks it
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise InputError(
            f"{name} must be map-style, with len() and indexing, or a stream: an IterableDataset whose __iter__ begins "
            f"anew, or a source with open(shard, start); got {type(dataset).__name__}"
        )
    if len(dataset) == 0:
        raise InputError(f"{name} is empty: pass one with at least one sample")


def check_list(callbacks: Any) -> tuple[Any, ...]:
    """The callbacks as a tuple; InputError where it is a single one."""
    if callbacks is None or isinstance(callbacks, list | tuple):
        return tuple(callbacks or ())
    raise InputError(
        f"callbacks must be a list, got {type(callbacks).__name__}; pass callbacks=[{type(callbacks).__name__}(...)]"
    )


def check_callbacks(callbacks: Sequence[Any], has_evaluation: bool) -> None:
    """InputError for what would never be called."""
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, type):
            raise InputError(
                f"callbacks=[{callback.__name__}] is a class; pass an object of it: {callback.__name__}(...)"
            )
        found = [word for word in dir(callback) if word.startswith("on_") and callable(getattr(callback, word))]
        unknown = [word for word in found if word not in HOOKS]
        if unknown or not found:
            what = f"{name} has {unknown[0]}, which is never called" if unknown else f"{name} has no method to call"
            raise InputError(f"callbacks: {what}; a callback has one or more of {', '.join(HOOKS)}")
        if getattr(callback, "needs_evaluation", False) and not has_evaluation:
            raise InputError(f"callbacks: {name} follows an evaluated metric; pass evaluate=(test_set, eval_step), too")


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
