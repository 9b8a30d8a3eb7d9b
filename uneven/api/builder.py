"""The builder: `Ddp.builder(...)` collects a task and its settings, `run()` checks them and starts.

`fit` is the same in one call. The methods of single settings are in api/settings.py, made from the fields of RunConfig.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from uneven.api.settings import SettingMethods
from uneven.config import EvalStep, Loading, RunConfig, Task, TrainStep, check_evaluate, check_list, read_every, resolve
from uneven.config.sources import by_name
from uneven.config.text import INTERVAL
from uneven.data.user_loader import take_apart, take_test_set
from uneven.errors import InputError
from uneven.launch.context import ProcessContext, command_line_settings, process_context
from uneven.launch.run import Run, launch
from uneven.plan.choose import choose
from uneven.results.checkpoint_folders import is_checkpoint

if TYPE_CHECKING:
    from typing_extensions import Self

_RESUMED: "WeakKeyDictionary[ProcessContext, Path]" = WeakKeyDictionary()  # the run that `uneven run --resume` was for


@dataclass
class TaskParts:
    """What a script gives beside model, optimizer, step and settings, in each of its three ways; not checked yet."""

    dataset: Any = None
    scheduler: Any = None
    evaluation: tuple[Any, ...] | None = None  # (test_set, eval_step, every, batch_size, collate_fn), or the first two
    before_step: Callable[..., Any] | None = None
    loading: Loading = field(default_factory=Loading)
    callbacks: Sequence[Any] = ()

    def __post_init__(self) -> None:
        if self.evaluation is not None:
            check_evaluate(self.evaluation)
        self.callbacks = check_list(self.callbacks)

    def make_task(
        self, make_model: Any, make_optimizer: Any, train_step: TrainStep, settings: Mapping[str, Any]
    ) -> tuple[Task, RunConfig]:
        """With what a DataLoader says, and what `uneven run` was given."""
        dataset, loading, settings = take_apart(self.dataset, self.loading, settings, command_line_settings())
        evaluation = None
        if self.evaluation is not None:
            test_set, eval_step, every, batch_size, collate_fn = (*self.evaluation, "epoch", None, None)[:5]
            evaluation = take_test_set(test_set, eval_step, every, batch_size, collate_fn, self.loading.collate_fn)
        task = Task(
            make_model,
            make_optimizer,
            train_step,
            dataset,
            self.scheduler,
            evaluation,
            loading,
            tuple(self.callbacks),
            before_step=self.before_step,
        )
        return task, resolve_here(settings)


class Builder(SettingMethods):
    """Life cycle: made from the factories, filled by its methods in any order, `run()` at the end.

    Nothing is checked and nothing starts before `run()`, which may be called again for another run.
    """

    def __init__(
        self, make_model: Any, make_optimizer: Any, train_step: TrainStep, parts: TaskParts | None = None
    ) -> None:
        super().__init__()
        self._factories = (make_model, make_optimizer, train_step)
        self._parts = parts or TaskParts()
        self._on_epoch: list[Callable[[dict[str, Any]], None]] = []

    def dataset(self, dataset: Any) -> "Self":
        """The training set: a TensorData, a TensorDataset, any map-style data set, or a DataLoader of one."""
        self._parts.dataset = dataset
        return self

    def collate_fn(self, collate_fn: Callable[[list[Any]], Any]) -> "Self":
        """collate_fn(list of samples) -> a batch, as in a DataLoader; for a test set that is none, too."""
        self._parts.loading = replace(self._parts.loading, collate_fn=collate_fn)
        return self

    def sampler(self, sampler: Iterable[int]) -> "Self":
        """The order of each epoch in place of a permutation; as in a DataLoader, but drawn alike on every device."""
        self._parts.loading = replace(self._parts.loading, sampler=sampler)
        return self

    def batch_sampler(self, batch_sampler: Iterable[Sequence[int]]) -> "Self":
        """Batches of sample numbers, each of which is one optimizer step; in place of batch_size."""
        self._parts.loading = replace(self._parts.loading, batch_sampler=batch_sampler)
        return self

    def scheduler(self, make_scheduler: Callable[..., Any]) -> "Self":
        """make_scheduler(optimizer) or make_scheduler(optimizer, total_steps) -> a torch scheduler."""
        self._parts.scheduler = make_scheduler
        return self

    def evaluate(
        self,
        test_set: Any,
        eval_step: EvalStep,
        every: str | int = "epoch",
        batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> "Self":
        """Evaluate every N epochs, or as in "500 steps" or "10 min", and always at the end; it is no training time.

        The setting `eval_every` says the same and takes precedence. The test set may be a DataLoader, which is read as
        it says. Any other is read with the builder's `collate_fn`, unless it is given one here.
        """
        if read_every(every) is None:
            raise InputError(f"every={every!r} must be 'epoch', {INTERVAL}")
        self._parts.evaluation = (test_set, eval_step, every, batch_size, collate_fn)
        return self

    def callbacks(self, *callbacks: Any) -> "Self":
        """Objects with on_start, on_step, on_round, on_eval, on_save, on_end or some of them; see `uneven.Callback`."""
        self._parts.callbacks = (*self._parts.callbacks, *callbacks)
        return self

    def before_step(self, function: Callable[..., Any]) -> "Self":
        """function(model) or function(model, optimizer) before every update, with the summed gradients in place."""
        self._parts.before_step = function
        return self

    def on_epoch(self, callback: Callable[[dict[str, Any]], None]) -> "Self":
        """callback(entry) after every epoch, with its loss, speed and metrics; an exception in it ends the run."""
        if not callable(callback):
            raise InputError(f"on_epoch must be a function of an entry of the history, got {type(callback).__name__}")
        self._on_epoch.append(callback)
        return self

    def run(self) -> Run:
        """Check everything and start; returns at once. `.join()` on the result waits for the trained state."""
        task, config = self._parts.make_task(*self._factories, {**self._settings})
        choice = choose(task, config)
        return launch(task, choice.config, on_epoch=self._on_epoch, plan=choice.plan, notes=choice.notes)


def resolve_here(settings: Mapping[str, Any]) -> RunConfig:
    """The settings that the script passes, checked; those that `uneven run` was given take precedence."""
    context = process_context()
    context.visitor.see_settings(settings)
    overrides = dict(context.settings)
    if not _takes_resume(settings, overrides, context):
        if context.rank == 0:
            run, out = overrides["resume"], str(by_name(settings)["out"])
            line = f"uneven: --resume {run} is not the run of out={out!r}, which begins as without it"
            print(f"{line}; --resume auto is for all runs of a script", file=sys.stderr, flush=True)
        del overrides["resume"]
    return resolve(settings, overrides)


def _takes_resume(settings: Mapping[str, Any], overrides: Mapping[str, Any], context: ProcessContext) -> bool:
    """Whether `uneven run --resume FOLDER` is for this call: a script may train several runs, and all of them would go
    on from the checkpoints of one. It is for the one that writes there, else for the first.

    No file is looked at: all ranks come to the same answer.
    """
    resume, own = overrides.get("resume"), by_name(settings).get("out")
    if resume in (None, "auto") or own is None or "out" in overrides:
        return True
    named, out = Path(str(resume)).resolve(), Path(own).resolve()
    is_named = out == (named.parent if is_checkpoint(named) else named)
    taken = _RESUMED.setdefault(context, out)
    if is_named and taken != out:
        raise InputError(
            f"--resume {resume}: the script's first run, out={str(taken)!r}, has gone on from it already; "
            "--resume auto lets each of its runs go on from its own"
        )
    return taken == out
