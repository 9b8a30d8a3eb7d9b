"""The user's own training loop: batches out, losses in, and one optimizer step of all ranks in between.

    for x, y in ddp.batches(epoch):
        ddp.step(F.cross_entropy(ddp(x), y))

Made by `Ddp.setup`. A Worker does the work; its train step returns the loss that the user has just passed to `step`.
Invariant: every rank trains its part of every slot, in order. A rank that leaves this order (a break, a batch without
its step) sends its status in one last collective, and all ranks raise: none waits for a rank that does not come.
"""

import atexit
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from uneven.api.batch_steps import BatchSteps
from uneven.api.loop_calls import LoopCalls
from uneven.api.loop_progress import EpochLog, LoopRecovery, LoopResume
from uneven.config import Task
from uneven.data.feed import Micros
from uneven.data.tensors import Batch
from uneven.errors import InputError, LeftLoopError, RankError
from uneven.policy.axis import Part
from uneven.policy.stream_axis import StreamAxis
from uneven.results.state import TrainedState
from uneven.train.synchronizer import RankStatus, Synchronizer
from uneven.train.worker import UNMEASURED, Worker


class LoopRun(Protocol):
    """What is around a loop in its process; `Ddp.setup` makes it."""

    @property
    def was_interrupted(self) -> bool:
        """By a signal, since the loop was made."""
        ...

    def make_worker(self, task: Task) -> Worker: ...

    def save(self, worker: Worker, was_interrupted: bool) -> TrainedState:
        """Collect and save the finished run, with the group still open."""
        ...

    def end(self) -> None:
        """Close the group."""
        ...


class Loop(LoopCalls):
    """Made by `Ddp.setup`. Life cycle: `batches` and `step` for each epoch in turn, `finish()` once.

    As a context manager it finishes by itself, and when the process ends after the last epoch. Leaving it by an
    exception, or ending the process before, only closes the group: the other ranks see that and raise.
    """

    def __init__(self, task: Task, run: LoopRun, finished: TrainedState | None = None) -> None:
        """`finished`: the result of the run that was to be resumed, where nothing is left to train."""
        self._around = run
        self._steps = BatchSteps()
        self.worker = worker = run.make_worker(replace(task, train_step=self._steps.take_loss))
        self._log = EpochLog()
        self._skipped = 0  # epochs that were left out in part
        self._is_stopped = False  # by a callback: no more batches, and the state is there
        self._state: TrainedState | None = None
        self._resume = LoopResume(worker, self._log)
        self._recovery = LoopRecovery(worker, self._log, self._resume)
        worker.events.use_loop(self._recovery)
        self._stream: Iterator[tuple[Part, Micros]] | None = None
        self._stream_of: Synchronizer | None = None  # whose parts are in it
        self._next_part: tuple[Part, Micros] | None = None  # from it, and not handed out
        self._was_interrupted = False  # where the run ends
        self._iterators = 0  # iterators that `__iter__` has given
        self._is_completing = False
        self._open = ExitStack()
        if finished is not None:
            self._show_finished(finished)
            return
        joins = worker.rank_info.is_newcomer
        self._open.enter_context(worker.recording())
        try:
            if worker.config.compile == "default":
                worker.engine.model.compile()
            self._open.callback(self._steps.connect(worker))
            worker.initialize(UNMEASURED)
            worker.prepare_for_losses()
        except BaseException:
            self._open.close()
            run.end()
            raise
        self._resume.start(self._synchronizer.epoch)
        worker.report.started(worker.axis, worker.engine.feed.place)
        worker.inbox.start()
        self._user_since_ns = worker.recorder.enter("user")  # the user's own code runs, outside the epochs
        atexit.register(self._finish_at_exit)
        if joins:
            self._join_others()
        elif worker.callbacks.is_active:
            self._start_callbacks()

    @property
    def is_between_epochs(self) -> bool:
        """Whether a signal may interrupt this process, alone and in code of the user's own: the state is whole here."""
        is_open = self._broken is None and not self._is_completing
        return is_open and self._resume.iterated is None and self.world_size == 1

    def batches(self, epoch: int) -> Iterator[Batch]:
        """This rank's batches of an epoch, on its device; call `step` once for each. Epochs are consecutive."""
        if self._is_stopped:
            return iter(())
        self._check_usable()
        worker = self.worker
        due = self._synchronizer.epoch
        if self._resume.iterated is not None:
            raise InputError(f"epoch={epoch!r}: epoch {due} is still being iterated; take its batches to the end first")
        if isinstance(epoch, int) and 0 <= epoch < self._resume.past_epochs:
            self._resume.begin(epoch)
            return iter(())  # trained before the checkpoint from which this run goes on
        if due >= worker.config.epochs and worker.config.max_steps is not None:
            return iter(())  # the steps are done before the epochs are
        if due >= worker.config.epochs:
            raise InputError(f"epoch={epoch!r}: all {worker.config.epochs} epochs are trained; call finish()")
        if epoch != due:
            raise InputError(f"epoch={epoch!r}: epochs are consecutive, the next one is {due}; write range({due}, ...)")
        return self._iterate(epoch)

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the next epoch: a loop stands where a DataLoader stood."""
        self._iterators += 1
        is_done = self._iterators <= self._resume.past_epochs
        return self.batches(self._iterators - 1 if is_done or self._is_stopped else self._synchronizer.epoch)

    def step(self, loss: Any = None, *, optimizer: Any = None) -> None:
        """One optimizer step of all ranks by this batch's mean loss, or by (loss_sum, count).

        With accumulate=k only the last of a step's batches does so; losses of the others are added up, and none is to
        be divided by k. Without a loss it takes what `backward` has accumulated. Of several optimizers, `optimizer`
        says which: its name, or the optimizer itself; the loss then reaches the params of that one alone.
        """
        self._run(lambda: self._steps.step(loss, optimizer))

    def backward(self, loss: Any, *, optimizer: Any = None) -> None:
        """Add this loss's gradients without a step, and without any communication: `step()` follows.

        May be called several times for a batch: losses are added, and of (loss_sum, count) the first one's count is
        that of the batch. `optimizer` as in `step`.
        """
        self._run(lambda: self._steps.backward(loss, optimizer))

    def skip_rest(self) -> None:
        """Leave out the rest of this epoch, on all ranks: a batch without its step, and all that follow.

        Any rank may call it, also alone; `break` may follow. The others learn it in their next step, which then
        changes nothing, and their loops end. The history and the log say how many samples were left out.
        """
        self._check_usable()
        epoch = self._resume.iterated
        if epoch is None:
            raise InputError("ddp.skip_rest() belongs inside the loop over ddp.batches(epoch)")
        if self.worker.config.replay is not None or isinstance(self.worker.axis, StreamAxis):
            raise InputError("ddp.skip_rest() needs a data set with a length, and no replay=...")
        self._run(self._steps.end_slot)
        while self._synchronizer.epoch <= epoch and not self._is_stopped:  # else the last step is done, on every rank
            self._steps.drop()
            self._run(self.worker.skip_rest)

    def finish(self) -> TrainedState:
        """The trained state, the same on every rank; at an epoch's end, after the last or earlier on all ranks."""
        if self._state is not None:
            return self._state
        self._check_usable()
        if self._resume.iterated is not None:
            self._fail("ddp.finish() was called inside an epoch: take its batches to the end first")
        try:
            return self.worker.surviving(self._end, self._end_again)
        except InputError as error:  # found by all ranks together, as that their params differ
            self._broken = str(error)
            self._leave()
            raise
        except RankError as error:
            self._raise_for_all(str(error), type(error))
        except BaseException:
            self._open.close()
            raise

    def _end(self) -> TrainedState:
        self._end_together()
        self.worker.events.save_end_of_loop()
        return self._complete(was_interrupted=False)

    def _end_again(self) -> TrainedState:
        """Ranks were lost meanwhile, and the others may have come to the result."""
        self._go_on()
        return self._end() if self._state is None else self._state

    def _end_together(self) -> None:
        """All ranks have passed their last epoch together: who waits here waits for code of the user's own."""
        worker = self.worker
        if self._synchronizer.epoch < worker.config.epochs and self.world_size > 1:
            statuses = self._synchronizer.exchange_status(RankStatus.FINISHED)
            training = [rank for rank, status in enumerate(statuses) if status != RankStatus.FINISHED]
            if training:
                why = f"rank {self.rank} called ddp.finish() while rank {training[0]} still trains"
                self._raise_for_all(why, LeftLoopError)
        elif self._recovery.started < worker.config.epochs:
            self._recovery.start(worker.config.epochs)
        self._log.collect(worker.group, worker.history)

    def __enter__(self) -> "Loop":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self._leave_interrupted()

    def _iterate(self, epoch: int) -> Generator[Batch, None, None]:
        worker = self.worker
        self._resume.iterated = epoch
        self._resume.begin(epoch)
        try:
            self._synchronizer.note_user_time(worker.recorder.clock() - self._user_since_ns)
            self._synchronizer.reset_timer()
            while self._synchronizer.epoch <= epoch:
                self._run(self._take)
                if self._has_ended():
                    return
                if self._next_part is None:
                    continue  # ranks were lost: other parts are due
                part, micros = self._next_part
                if not micros:  # a mean over no samples is NaN, so the user gets no empty batch
                    self._run(partial(self._steps.train, part, []))
                    if self._has_ended():
                        return
                    continue
                self._run(partial(self._begin, part))
                for place in range(len(micros)):
                    self._log.keep()
                    yield self._steps.hand_out(part, micros, place)
                    self._steps.end_void()
                    if self._has_ended():
                        return
                    self._check_usable()
                    if not self._steps.is_trained:
                        self._fail(
                            "a batch was not trained: call ddp.step(loss) once for every batch before the next one; "
                            "ddp.backward and no_sync are for batches before the last one of accumulate=k"
                        )
                    self._run(self._steps.end_slot)
                    if self._has_ended():
                        return
                    worker.recorder.enter("data")
                    if self._synchronizer.epoch > epoch or self._stream_of is not self._synchronizer:
                        break  # the rest was left out, or ranks were lost, in the middle of a step's batches
        except GeneratorExit:
            # Nothing can be raised out of a break: the next call on this loop raises, on the other ranks their step.
            # By an exception of the user's own, perhaps, between two optimizers: where the others can go on without
            # this rank, it must not tell them that its step is over. After an epoch's last batch a break is fine.
            if worker.settler is None or worker.axis.ends_epoch(worker.engine.state.trained + 1):
                with suppress(InputError, RankError, KeyboardInterrupt):
                    self._run(self._steps.end_slot)
            if self._synchronizer.epoch <= epoch:
                is_sent = worker.settler is None
                self._leave_epoch(f"rank {self.rank} left epoch {epoch} at slot {worker.engine.state.trained}", is_sent)
            return
        finally:
            self._resume.iterated = None
        self._user_since_ns = worker.recorder.enter("user")  # what the user does between epochs is no training time

    def _run(self, action: Callable[[], Any]) -> None:
        """Run what may train, or end an epoch; a wrong use becomes an error on every rank.

        Where a rank is lost meanwhile, and the others can go on, they have settled when it returns.
        """
        self._check_usable()

        def act() -> bool:
            is_stopped = bool(action())
            if is_stopped:
                self._complete(was_interrupted=True)
            return is_stopped

        try:
            is_stopped = self.worker.surviving(act, self._go_on)
        except InputError as error:
            self._fail(str(error))
        except RankError as error:
            self._raise_for_all(str(error), type(error))
        skipped = len(self.worker.engine.state.skipped)
        if skipped > self._skipped and not is_stopped:  # what the feed has read ahead was left out
            self._skipped = skipped
            self._steps.drop()
            self._stream = None
        if is_stopped and not self._is_stopped:
            raise KeyboardInterrupt

    def _take(self) -> None:
        """The next part of this rank, from the feed of the present generation."""
        self._next_part = None
        self._recovery.check()
        if self._resume.iterated is not None and self._recovery.started < self._resume.iterated:
            self._recovery.start(self._resume.iterated)
        synchronizer = self._synchronizer
        if self._stream is None or self._stream_of is not synchronizer:
            self._stream, self._stream_of = self.worker.engine.feed.stream(synchronizer.parts()), synchronizer
        self._next_part = next(self._stream)

    def _begin(self, part: Part) -> None:
        """Before the user's forward, which comes before the step and may change buffers."""
        self._synchronizer.begin(part)
        self.worker.engine.step.begin()

    def _go_on(self) -> bool:
        """Those who are left have settled; returns whether the run is over, because it was stopped before."""
        self._is_completing = False
        if self._steps.take_back():
            self._log.forget()
        is_stopped = self._recovery.reach()
        if self._recovery.is_over:
            self._take_result()
        elif is_stopped:
            self._complete(was_interrupted=True)
        elif self._resume.iterated is None:
            self._user_since_ns = self.worker.recorder.enter("user")
        else:
            self._steps.begin_void()
        return self._state is not None and self._was_interrupted

    def _join_others(self) -> None:
        """They have settled with this rank, and reach the next event, if one was interrupted."""
        self.worker.callbacks.run("on_start", 0, self.worker.history)
        self._run(self._recovery.reach)
        if self._state is None:
            self._resume.join(self._synchronizer.epoch, self._recovery.calls)
            self._user_since_ns = self.worker.recorder.enter("user")

    def _has_ended(self) -> bool:
        return self._is_stopped

    def _start_callbacks(self) -> None:
        try:
            is_stopped = self.worker.start_callbacks()
            if is_stopped:
                self._complete(was_interrupted=True)
        except BaseException:
            self._leave()
            raise
        self._user_since_ns = self.worker.recorder.enter("user")

    def _show_finished(self, state: TrainedState) -> None:
        """All is trained: model and optimizer are as at the end, there are no batches, `finish` returns the result."""
        state.load_into(self.model)
        self._load_end(state)
        self.worker.engine.state.show_end(state.slot, state.skipped)
        self._state, self._is_stopped = state, True
        self._around.end()

    def _complete(self, was_interrupted: bool) -> TrainedState:
        self._is_completing, self._was_interrupted = True, was_interrupted
        self.worker.end(was_interrupted)
        return self._take_result()

    def _take_result(self) -> TrainedState:
        """All ranks have ended their training: collect the result."""
        self._open.close()
        self._is_stopped = self.worker.stopped is not None
        self._state = self._around.save(self.worker, self._was_interrupted and not self._is_stopped)
        self._leave()
        return self._state

    def _finish_at_exit(self) -> None:
        if self._broken is None and self._state is None and self._synchronizer.epoch >= self.epochs:
            with suppress(RuntimeError):  # another rank failed after its last epoch, and says why itself
                self.finish()
                return
        if self._state is None and not self._around.was_interrupted:
            done = f"{self._synchronizer.epoch} of {self.epochs} epochs"
            self.worker.report.say([f"the script ended after {done}, without ddp.finish(), which saves the result"])
        if self._is_untold:
            self._tell_left()
        self._leave_interrupted()

    def _leave_interrupted(self) -> None:
        """Leave; where a signal has interrupted the script between two epochs, with what was trained saved."""
        if self._around.was_interrupted and self.is_between_epochs and self.worker.engine.state.trained:
            self._complete(was_interrupted=True)
        else:
            self._leave()

    def _leave(self) -> None:
        """Close the group without any collective; the model is a plain module again."""
        atexit.unregister(self._finish_at_exit)
        if self._broken is None and self._state is None:
            self._broken = "this loop was left before it finished"
        self._stream = self._next_part = None  # its loader processes end
        self._open.close()
        self._synchronizer.close()
        self._around.end()
