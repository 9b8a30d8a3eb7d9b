"""The entry points: `fit` in one call, `Ddp.builder` in steps, `Ddp.setup` for a user's own loop, `Ddp.wrap` by hand.

Invariant: the same script runs on one device (plain training in this process), on several named devices, and under
`uneven run` or torchrun, without a change.
"""

import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from uneven.api.builder import Builder, TaskParts
from uneven.api.loop import Loop
from uneven.api.loop_inputs import as_module, check_loop, optimizer_factory, scheduler_factory
from uneven.api.manual import Wrapped
from uneven.api.settings import Settings
from uneven.config import EvalStep, Loading, Task, TrainStep
from uneven.errors import InputError
from uneven.files import release_out_folder
from uneven.hardware.device import Device, needs_ranks
from uneven.hardware.gpus import usable_devices
from uneven.hardware.interference import Interference, read_counters
from uneven.launch.checks.preflight import Prepared
from uneven.launch.context import process_context
from uneven.launch.ended import save_interrupted, save_results
from uneven.launch.signals import SIGNALS
from uneven.launch.start import Start, starting
from uneven.launch.training import finish
from uneven.plan.choose import Choice, choose
from uneven.results.state import TrainedState
from uneven.train.worker import Worker

if TYPE_CHECKING:
    from typing_extensions import Unpack


def fit(
    *,
    model: Callable[[], nn.Module] | nn.Module,
    optimizer: Callable[[Any], Optimizer] | Optimizer,
    step: TrainStep,
    dataset: Any,
    scheduler: Callable[..., Any] | None = None,
    evaluate: tuple[Any, EvalStep] | None = None,
    before_step: Callable[..., Any] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    sampler: Iterable[int] | None = None,
    batch_sampler: Iterable[Sequence[int]] | None = None,
    callbacks: Sequence[Any] = (),
    **settings: "Unpack[Settings]",
) -> TrainedState:
    """Train a model and return its state.

    model() makes the model; optimizer(params) its optimizer; step(model, batch) returns the batch's mean
    loss, or (loss_sum, count); scheduler(optimizer) or scheduler(optimizer, total_steps) makes a torch
    scheduler; evaluate is (test_set, eval_step) with eval_step(model, batch) -> (dict of sums, count);
    before_step(model) is called before every update, with the summed gradients in the params' .grad.
    dataset and test_set may be DataLoaders; collate_fn, sampler and batch_sampler mean what they mean there.
    callbacks are objects with some of the methods of `uneven.Callback`, such as EarlyStopping("loss").
    A model or an optimizer itself is taken, too: every device trains a copy, and the one given stays as it is.

    >>> import torch
    >>> x = torch.linspace(-1, 1, 64).unsqueeze(1)
    >>> state = fit(
    ...     model=lambda: torch.nn.Linear(1, 1),
    ...     optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
    ...     step=lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]),
    ...     dataset=torch.utils.data.TensorDataset(x, 3 * x),
    ...     batch_size=16, epochs=20, devices="cpu", progress="off",
    ... )
    >>> round(state.params["weight"].item(), 2)
    3.0
    """
    parts = TaskParts(
        dataset,
        scheduler,
        evaluate,
        before_step,
        Loading(collate_fn=collate_fn, sampler=sampler, batch_sampler=batch_sampler),
        callbacks,
    )
    return Builder(model, optimizer, step, parts).settings(**settings).run().join()


ROWS_MOVE = (
    "  shuffle=False: samples come in order, but rows move between devices as shares follow the speeds; a state "
    "carried from batch to batch needs policy='sync' or shares=..., and drop_last=True"
)


class Ddp:
    """Where training on one or many devices starts."""

    @staticmethod
    def builder(
        make_model: Callable[[], nn.Module] | nn.Module,
        make_optimizer: Callable[[Any], Optimizer] | Optimizer,
        train_step: TrainStep,
    ) -> Builder:
        """Factories first, then one method per setting, then `.run()`."""
        return Builder(make_model, make_optimizer, train_step)

    @staticmethod
    def setup(
        model: Any,
        optimizer: Any,
        *,
        dataset: Any,
        scheduler: Any = None,
        evaluate: tuple[Any, EvalStep] | None = None,
        before_step: Callable[..., Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        callbacks: Sequence[Any] = (),
        **settings: "Unpack[Settings]",
    ) -> Loop:
        """A training loop of your own; see uneven/api/loop.py. The model is trained in place.

        optimizer is one of the model's params, or a function that makes it; scheduler likewise. Several models and
        optimizers are dicts or lists. `dataset` may be a DataLoader; collate_fn, sampler and batch_sampler mean what
        they mean there. On several devices the script is started by `uneven run` or torchrun; the group forms here.
        When a callback stops the run, `batches` has no more of them.
        """
        parts = TaskParts(
            dataset,
            scheduler,
            evaluate,
            before_step,
            Loading(collate_fn=collate_fn, sampler=sampler, batch_sampler=batch_sampler),
            callbacks,
        )
        module = as_module(model)
        make_optimizer = optimizer_factory(module, optimizer)
        task, config = parts.make_task(lambda: module, make_optimizer, lambda *_: None, {**settings})
        task = replace(task, make_scheduler=scheduler_factory(scheduler, optimizer, config), is_own_loop=True)
        choice = choose(task, config)
        out = choice.config.out
        try:
            with starting(process_context(), choice.config, signal.SIGINT) as start:
                return _start_loop(task, optimizer, choice, start)
        except BaseException:
            if out is not None and process_context().rank == 0:
                release_out_folder(out)
            raise

    @staticmethod
    def wrap(model: nn.Module) -> Wrapped:
        """For a loop that calls its own optimizer: the model, with the collectives over all ranks beside it.

        The ranks are those that `uneven run` or torchrun started; see uneven/api/manual.py.
        """
        if not isinstance(model, nn.Module):
            raise InputError(f"Ddp.wrap takes the model itself, as in Ddp.wrap(Net()), got {model!r}")
        context = process_context()
        context.visitor.see_wrap()
        rank_info = context.make_rank_info()
        try:
            context.join(model, rank_info)
            return Wrapped(model, rank_info, context.end_run)
        except BaseException:
            context.end_run()  # its watch over the other ranks is on already
            raise

    @staticmethod
    def rank() -> int:
        """This process's rank; 0 in a process alone."""
        return process_context().rank


def _start_loop(task: Task, optimizer: Any, choice: Choice, start: Start) -> Loop:
    context, config = process_context(), choice.config
    script = Path(sys.argv[0]).name if sys.argv and sys.argv[0].endswith(".py") else "train.py"
    unused: list[Device] = []
    if context.is_alone and config.devices == "auto":
        first, *unused = usable_devices()
        config = replace(config, devices=str(first))
    prepared = start.prepare(task, config)
    config, devices = prepared.config, prepared.devices
    reporter = prepared.reporter
    check_loop(config, len(devices), optimizer)
    reporter.say(choice.notes)
    if unused:
        reporter.say([f"  {len(unused)} more CUDA devices are here: 'uneven run {script}' trains on all of them"])
    has_own_order = not config.shuffle and task.loading.sampler is None and task.loading.batch_sampler is None
    if has_own_order and len(devices) > 1 and not config.keeps_rows:
        reporter.say([ROWS_MOVE])
    if context.is_alone and needs_ranks(devices):
        raise InputError(
            f"devices={config.devices!r}: a loop of your own on several devices, or a slice, needs one process each: "
            f"name one whole device, as in {devices[0].torch_name!r}, "
            f"or start it by: uneven run {script} --devices {','.join(str(device) for device in devices)}"
        )
    start.list_run(prepared, is_here=True)
    run = _LoopRun(prepared, choice, start)
    start.begin()
    loop = Loop(task, run, prepared.finished)
    start.begin(may_leave=lambda: loop.is_between_epochs)
    return loop


class _LoopRun:
    """What is around a loop of one's own in this process: its worker before, its results and the run's end after."""

    def __init__(self, prepared: Prepared, choice: Choice, start: Start) -> None:
        self._prepared = prepared
        self._plan = choice.plan
        self._start = start
        self._context = process_context()
        self._begin = read_counters(self._context.tree_pid)
        self._state: TrainedState | None = None

    def make_worker(self, task: Task) -> Worker:
        prepared, requests = self._prepared, self._start.requests
        self._context.begin_run(requests)
        return self._context.make_worker(task, prepared.config, prepared.devices, requests, prepared.reporter)

    @property
    def was_interrupted(self) -> bool:
        return self._start.stoppable.received is not None

    def save(self, worker: Worker, was_interrupted: bool) -> TrainedState:
        context, start = self._context, self._start
        reporter = self._prepared.reporter
        interference = Interference.between(self._begin, read_counters(context.tree_pid))
        state = finish(context, worker, worker.surviving(worker.result))
        is_lead, has_page = worker.rank_info.rank == 0, not start.requests.is_terminated
        state = save_results(
            state, self._prepared.config, reporter, interference, is_lead, plan=self._plan, has_page=has_page
        )
        self._state = state
        start.tell_saved(state.folder)
        if was_interrupted and is_lead:
            start.tell_saved(save_interrupted(state, reporter))
        return state

    def end(self) -> None:
        start, context = self._start, self._context
        self._prepared.reporter.close()
        start.release_folder()
        context.end_run()
        start.end_listing(self._state, None)
        SIGNALS.discard(start.stoppable)
        was_terminated = start.requests.is_terminated or start.stoppable.received == signal.SIGTERM
        if was_terminated or context.ranks.was_peer_terminated():
            SIGNALS.leave()  # Terminated, unless it is on its way already
