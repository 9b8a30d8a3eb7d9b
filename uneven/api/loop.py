"""The user's own training loop: batches out, losses in, and one optimizer step of all ranks in between.

    for x, y in ddp.batches(epoch):
        ddp.step(F.cross_entropy(ddp(x), y))

Made by `Ddp.setup`. A Worker does the work; its train step returns the loss that the user has just passed to `step`.
Invariant: every rank trains its part of every slot, in order. A rank that leaves this order (a break, a batch without
its step) sends its status in one last collective, and all ranks raise: none waits for a rank that does not come.
"""

import atexit
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from uneven.config import REPLICATED, RunConfig, Task
from uneven.data.feed import Micros
from uneven.data.tensors import Batch
from uneven.errors import InputError, RankError
from uneven.policy.axis import Part
from uneven.results.state import TrainedState
from uneven.train.status import RankStatus
from uneven.train.worker import UNMEASURED, Worker

Save = Callable[[Worker, bool], TrainedState]  # (worker whose run is over, whether it was interrupted)


class Loop:
    """Made by `Ddp.setup`. Life cycle: `batches` and `step` for each epoch in turn, `finish()` once.

    As a context manager it finishes by itself. Leaving it by an exception, or ending the process without `finish`,
    only closes the group: the other ranks see that and raise.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[Any], Optimizer],
        dataset: Any,
        make_scheduler: Callable[..., Any] | None,
        make_worker: Callable[[Task], Worker],
        save: Save,
        end_run: Callable[[], None],
    ) -> None:
        """`save` collects and saves the finished run, with the group still open; `end_run` closes the group."""
        task = Task(lambda: model, make_optimizer, self._take_loss, dataset, make_scheduler)
        self._save, self._end_run = save, end_run
        self.worker = worker = make_worker(task)
        self._loss: Any = None
        self._due: tuple[Part, Micros] | None = None  # the batch that waits for its step
        self._began_ns = 0
        self._is_iterating = False
        self._broken: str | None = None
        self._state: TrainedState | None = None
        self._open = ExitStack()
        self._open.enter_context(worker.recording())
        try:
            if worker.config.compile == "default":
                worker.engine.model.compile()
            self._synchronizer = worker.initialize(UNMEASURED)
        except BaseException:
            self._open.close()
            end_run()
            raise
        worker.report.started(worker.axis, worker.engine.feed.place)
        self._stream = worker.engine.feed.stream(self._synchronizer.parts())
        self._user_since_ns = worker.recorder.enter("user")  # the user's own code runs, outside the epochs
        atexit.register(self._leave)

    @property
    def model(self) -> nn.Module:
        return self.worker.engine.model

    @property
    def optimizer(self) -> Optimizer:
        return self.worker.engine.optimizer

    @property
    def rank(self) -> int:
        return self.worker.rank_info.rank

    @property
    def world_size(self) -> int:
        return self.worker.rank_info.world_size

    @property
    def epochs(self) -> int:
        """Of this run: `for epoch in range(ddp.epochs)` follows the `--epochs` of `uneven run`, too."""
        return self.worker.config.epochs

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The model, in the run's precision."""
        with self.worker.engine.eager.precision.region():
            return self.worker.engine.model(*inputs, **named)

    def batches(self, epoch: int) -> Iterator[Batch]:
        """This rank's batches of an epoch, on its device; call `step` once for each. Epochs are consecutive."""
        self._check_usable()
        worker = self.worker
        due = self._synchronizer.epoch
        if self._is_iterating:
            raise InputError(f"epoch={epoch!r}: epoch {due} is still being iterated; take its batches to the end first")
        if due >= worker.config.epochs:
            raise InputError(f"epoch={epoch!r}: all {worker.config.epochs} epochs are trained; call finish()")
        if epoch != due:
            raise InputError(f"epoch={epoch!r}: epochs are consecutive, the next one is {due}; write range({due}, ...)")
        return self._iterate(epoch)

    def step(self, loss: Any) -> None:
        """One optimizer step of all ranks by this batch's mean loss, or by (loss_sum, count)."""
        self._check_usable()
        if self._due is None:
            self._fail("ddp.step() was called without a batch: call it once for every batch of ddp.batches(epoch)")
        tensor = loss[0] if isinstance(loss, tuple) and len(loss) == 2 else loss
        if not isinstance(tensor, Tensor) or tensor.numel() != 1 or not tensor.requires_grad:
            self._fail(
                f"ddp.step() was given {_name_loss(loss)}; pass the batch's mean loss as one scalar tensor with its "
                "graph (before backward, without detach), or (loss_sum, count)"
            )
        (part, micros), self._due = self._due, None
        self._loss = loss
        worker = self.worker
        if self.world_size == 1:  # with several ranks the step's clock starts at the last collective
            worker.engine.simulate_slowdown(self._began_ns)
        self._train(part, micros)

    def finish(self) -> TrainedState:
        """The trained state, the same on every rank; at an epoch's end, after the last or earlier on all ranks."""
        if self._state is not None:
            return self._state
        self._check_usable()
        worker = self.worker
        if self._is_iterating:
            self._fail("ddp.finish() was called inside an epoch: take its batches to the end first")
        if self._synchronizer.epoch < worker.config.epochs and self.world_size > 1:
            statuses = self._synchronizer.exchange_status(RankStatus.FINISHED)
            training = [rank for rank, status in enumerate(statuses) if status != RankStatus.FINISHED]
            if training:
                self._raise_for_all(f"rank {self.rank} called ddp.finish() while rank {training[0]} still trains")
        # All ranks have passed the last epoch together: who waits here waits for code of the user's own.
        worker.group.all_reduce(torch.zeros(1)).wait()
        return self._complete(was_interrupted=False)

    @contextmanager
    def pause(self, what: str = "user code") -> Iterator[None]:
        """Around long work of your own inside an epoch, such as an evaluation on rank 0: no training time, no deadline.

        `what` names it in the timeline. Other ranks may go on, or wait in their next step; they do the same or not.
        """
        recorder = self.worker.recorder
        if not self._is_iterating or recorder.state == "user":  # between epochs all time is the user's already
            yield
            return
        before = recorder.state
        began_ns = recorder.enter("user")
        recorder.event("pause", what=what)
        try:
            yield
        finally:
            spent_ns = recorder.enter(before) - began_ns
            self._synchronizer.note_user_time(spent_ns)
            self._began_ns += spent_ns

    def __enter__(self) -> "Loop":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self._leave()

    def _iterate(self, epoch: int) -> Generator[Batch, None, None]:
        worker = self.worker
        self._is_iterating = True
        try:
            self._synchronizer.note_user_time(worker.recorder.clock() - self._user_since_ns)
            self._synchronizer.reset_timer()
            while self._synchronizer.epoch <= epoch:
                part, micros = next(self._stream)
                if not micros:  # a mean over no samples is NaN, so the user gets no empty batch
                    self._train(part, [])
                    continue
                self._due = (part, micros)
                self._began_ns = worker.recorder.enter("compute")
                yield micros[0][0]
                if self._is_step_due():
                    self._fail("a batch was not trained: call ddp.step(loss) once for every batch before the next one")
                self._check_usable()
                worker.recorder.enter("data")
        except GeneratorExit:
            # Nothing can be raised out of a break: the next call on this loop raises, on the other ranks their step.
            if self._synchronizer.epoch <= epoch:
                self._leave_epoch(f"rank {self.rank} left epoch {epoch} at slot {worker.engine.trained}")
            return
        finally:
            self._is_iterating = False
        self._user_since_ns = worker.recorder.enter("user")  # what the user does between epochs is no training time

    def _train(self, part: Part, micros: Micros) -> None:
        try:
            is_stopped = self.worker.train_part(self._synchronizer, part, micros)
        except RankError as error:
            self._raise_for_all(str(error))
        if is_stopped:
            self._complete(was_interrupted=True)
            raise KeyboardInterrupt

    def _is_step_due(self) -> bool:
        return self._due is not None

    def _take_loss(self, model: nn.Module, batch: Any) -> Any:
        """The worker's train step: the user has run forward already."""
        del model, batch
        loss, self._loss = self._loss, None
        return loss

    def _leave_epoch(self, why: str) -> None:
        if self._broken is not None or self._state is not None:
            return
        self._due = None
        self._broken = f"{why}: take all batches of ddp.batches(epoch), with one ddp.step(loss) each"
        if self.world_size > 1:
            with suppress(RuntimeError):  # the other ranks may have ended already
                self._synchronizer.exchange_status(RankStatus.LEFT_EPOCH)
        self._leave()

    def _fail(self, message: str) -> NoReturn:
        """A wrong use on this rank: raise here, and send the status so that the other ranks do not wait."""
        self._leave_epoch(f"rank {self.rank}: {message}")
        raise InputError(message)

    def _raise_for_all(self, message: str) -> NoReturn:
        self._broken = message
        self._leave()
        raise RankError(message)

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise RankError(self._broken)
        if self._state is not None:
            raise InputError("this loop is finished; call Ddp.setup again to train on")

    def _complete(self, was_interrupted: bool) -> TrainedState:
        worker = self.worker
        self._synchronizer.finalize()
        self._open.close()
        self._state = self._save(worker, was_interrupted)
        self._leave()
        return self._state

    def _leave(self) -> None:
        """Close the group without any collective; the model is a plain module again."""
        atexit.unregister(self._leave)
        if self._broken is None and self._state is None:
            self._broken = "this loop was left before it finished"
        self._open.close()
        self._synchronizer.close()
        self._end_run()


def check_loop(config: RunConfig, size: int) -> None:
    """InputError for settings that a loop of the user's own cannot follow."""
    if config.accumulate > 1:
        raise InputError(
            f"accumulate={config.accumulate} with Ddp.setup: one ddp.step is one optimizer step of all ranks; make "
            "batch_size larger, or use fit, which has micro-batches"
        )
    if config.compile == "graph":
        raise InputError("compile='graph' with Ddp.setup: a loop of your own cannot be captured; use fit, or 'default'")
    if size > 1 and not config.is_replicated:
        raise InputError(
            f"strategy={config.strategy!r} with Ddp.setup: there devices wait for each other inside forward and "
            f"backward, where a loop of your own may stop; use fit or Ddp.builder, or one of {', '.join(REPLICATED)}"
        )
    if config.activations == "auto":
        raise InputError("activations='auto' with Ddp.setup: there is no train step to measure; use 'recompute' or fit")
    _check_caps(config, size)
    if config.sync_batchnorm and size > 1:
        raise InputError(
            "sync_batchnorm=True with Ddp.setup: BatchNorm is summed over devices in every layer, and a rank without "
            "samples in a step has no batch to run through them; use fit or Ddp.builder"
        )


def _check_caps(config: RunConfig, size: int) -> None:
    """A rank's part of a step is one batch here, so caps can only bound shares that follow the speeds."""
    if config.memory_cap is None:
        return
    if size == 1 or config.policy != "balanced" or config.has_fixed_shares:
        raise InputError(
            f"memory_cap={config.memory_cap!r} with Ddp.setup bounds the shares of policy='balanced' on several "
            "devices; here it would be ignored: leave it out and make batch_size smaller"
        )
    held, samples = sum(config.caps(size)), config.slot_size(size)
    if held < samples:
        raise InputError(
            f"memory_cap={config.memory_cap!r} holds {held:g} of the {samples} samples of a step, and with Ddp.setup "
            "there are no micro-batches; make batch_size smaller, or use fit"
        )


def _name_loss(loss: Any) -> str:
    if isinstance(loss, torch.Tensor):
        return f"a tensor of shape {tuple(loss.shape)}" + ("" if loss.requires_grad else " without a graph")
    return f"a {type(loss).__name__}"
