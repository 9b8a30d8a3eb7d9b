"""What to train: the user's factories, train step and data, checked before anything starts. Pure: imports no torch."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from uneven.errors import InputError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

TrainStep = Callable[["nn.Module", Any], Any]
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
    every: int = 1  # epochs; the last epoch is always evaluated
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
