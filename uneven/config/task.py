"""What to train: the user's factories, train step and data, checked before anything starts. Pure: imports no torch."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from uneven.errors import InputError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

TrainStep = Callable[["nn.Module", Any], Any]
HOOKS = ("on_start", "on_step", "on_round", "on_eval", "on_save", "on_end")  # what a callback may have
EvalStep = Callable[["nn.Module", Any], tuple[Mapping[str, Any], int]]


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
    before_step: Callable[..., Any] | None = None  # (model) or (model, optimizer), with the summed gradients in place


def check_task(task: Task) -> None:
    """InputError where the task cannot be trained, with the argument and the fix."""
    is_built = not isinstance(task.make_model, type) and hasattr(task.make_model, "named_parameters")
    if not callable(task.make_model) or is_built:
        raise InputError(
            f"model must be a function that makes the model, got {type(task.make_model).__name__}: "
            "each device builds its own, so pass model=lambda: Net() (or the class itself)"
        )
    for name, value in (("optimizer", task.make_optimizer), ("step", task.train_step)):
        if not callable(value):
            raise InputError(f"{name} must be a function, got {type(value).__name__}")
    if task.before_step is not None and not callable(task.before_step):
        raise InputError(
            f"before_step must be a function of (model) or (model, optimizer), got {type(task.before_step).__name__}"
        )
    if not isinstance(task.dataset, Sized) or not hasattr(task.dataset, "__getitem__"):
        raise InputError(
            f"dataset must be map-style, with len() and indexing, got {type(task.dataset).__name__}; "
            "an iterable data set cannot be shared out exactly once"
        )
    if len(task.dataset) == 0:
        raise InputError("dataset is empty: there is nothing to train on")
    check_callbacks(task.callbacks, task.evaluation is not None)


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
