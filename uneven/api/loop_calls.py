"""What the user may call beside batches and steps: what the run is, numbers for the history, metrics, checkpoints.

The part of Loop (api/loop.py) that trains nothing; and how a loop is left before its end, by a wrong use on one rank or
an error on all of them, so that no rank waits for one that does not come.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from uneven.api.batch_steps import BatchSteps
from uneven.api.loop_progress import EpochLog, LoopRecovery, LoopResume, common_metric
from uneven.comm.group import SoloGroup
from uneven.config import EvalStep, check_evaluation
from uneven.data.feed import make_feed
from uneven.data.user_loader import take_test_set
from uneven.errors import InputError, LeftLoopError, RankError
from uneven.results.state import TrainedState
from uneven.step.evaluation import evaluate
from uneven.step.several import OptimizerGroup
from uneven.train.saved_state import Resumed, find_end
from uneven.train.synchronizer import RankStatus, Synchronizer
from uneven.train.worker import Worker


class LoopCalls:
    worker: Worker
    _steps: BatchSteps
    _log: EpochLog
    _resume: LoopResume
    _recovery: LoopRecovery
    _state: TrainedState | None
    _is_stopped: bool
    _at_end: Resumed | None = None  # the last checkpoint of a run that was over before this process began
    _broken: str | None = None  # why no call is possible any more
    _is_untold = False  # and the other ranks do not know

    @property
    def _synchronizer(self) -> Synchronizer:
        """Of the present generation of ranks."""
        assert self.worker.synchronizer is not None, "made when the group has formed"
        return self.worker.synchronizer

    @property
    def model(self) -> nn.Module:
        return self.worker.engine.model

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer; of several, all of them as one."""
        return self.worker.engine.optimizer

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """By name, or by their places "0", "1", ..."""
        made = self.worker.engine.optimizer
        return dict(made.members) if isinstance(made, OptimizerGroup) else {"0": made}

    @property
    def device(self) -> torch.device:
        return self.worker.engine.device

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

    @property
    def global_step(self) -> int:
        """Optimizer steps of the whole run until here; in cadence and async this rank's place on the axis."""
        return self.worker.engine.state.trained - self.worker.engine.state.skipped_slots

    @property
    def samples(self) -> int:
        """Samples that all ranks together have trained until `global_step`."""
        return self.worker.engine.state.samples_before(self.worker.engine.state.trained)

    @property
    def sync_gradients(self) -> bool:
        """Whether the present batch is the last of its step: with accumulate=k only there the optimizer steps."""
        return self._steps.is_last

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The model, in the run's precision."""
        with self.autocast():
            return self.worker.engine.model(*inputs, **named)

    def autocast(self) -> AbstractContextManager[Any]:
        """The run's precision, around a forward that is not `ddp(x)`."""
        return self.worker.engine.step.precision.region()

    @property
    def epoch(self) -> int:
        """Epochs that are done: `for epoch in range(ddp.epoch, ddp.epochs)` passes over those before a checkpoint.

        One at whose end the checkpoint was taken comes once more, without batches: the code after it has not run.
        """
        if self._state is not None:
            return self.worker.axis.epochs
        return self._resume.done_epochs(self._synchronizer.epoch)

    def register(self, name: str, value: Any) -> Any:
        """Keep `value` in every checkpoint under this name; returns it, with its saved state in a resumed run.

        Anything with state_dict and load_state_dict, or numbers, text, tensors, and lists and dicts of them. An object
        is given its state in place; a plain number comes back as it was saved, and is kept anew by another call.
        Steps save from inside: what belongs to a batch is changed before its `ddp.step`.
        """
        if self._is_stopped and self._at_end is None:
            return value
        if not self._is_stopped:
            self._check_usable()
        resumed = self._at_end or self.worker.resumed
        return self.worker.engine.state.register(name, value, dict if resumed is None else resumed.user_state)

    def _load_end(self, state: TrainedState) -> None:
        """Of a run that was over before this process began: what its result does not hold is in its last checkpoint."""
        assert state.folder is not None, "it was read from there"
        self._at_end = find_end(state.folder, state.slot, self.worker.rank_info)
        if self._at_end is not None:
            self._at_end.restore_optimizer(self.worker.engine)
            return
        missing = f"  no checkpoint of the end of {state.folder} is here: optimizer state and registered values are"
        self.worker.report.say([f"{missing} as at the beginning; a run keeps them with save_every=..."])

    def checkpoint(self) -> None:
        """Ask for a checkpoint: it is taken at the next slot where all ranks can meet. Any rank may ask."""
        if self._is_stopped:
            return
        self._check_usable()
        if self.worker.saves.out is None:
            raise InputError("ddp.checkpoint() needs a folder to write to: pass out='runs/my-run' to Ddp.setup")
        if self.worker.saves.why_not is not None:
            raise InputError(f"ddp.checkpoint(): {self.worker.saves.why_not}")
        self.worker.requests.save.set()

    def log(self, **values: Any) -> None:
        """Numbers for this epoch's entry in the history: means over all ranks, weighted by the samples of the batch.

        Between epochs they belong to the last one, and the ranks that log them count alike.
        """
        if self._is_stopped:
            return
        self._check_usable()
        if self._resume.iterated is None and self._resume.counts("log"):
            self._log.add(max(0, self._synchronizer.epoch - 1), values, 1.0, self.worker.callbacks.metrics)
            self._log.keep()
        elif self._resume.iterated is not None and not self._steps.is_void:
            self._log.add(self._resume.iterated, values, float(self._steps.samples), self.worker.callbacks.metrics)

    def scheduler_step(self, metric: Any = None) -> float:
        """Between epochs, on all ranks: feed an evaluated metric to the run's ReduceLROnPlateau; returns the metric.

        A rank that has not evaluated it passes None. All ranks use the mean of what was passed, so that their learning
        rates stay the same. What a resumed run was fed before its checkpoint is not fed again.
        """
        if self._is_stopped:
            return float("nan") if metric is None else float(metric)
        self._check_usable()
        if self._resume.iterated is not None:
            self._fail("ddp.scheduler_step(metric) belongs between epochs, where all ranks call it together")
        if self._resume.is_past("scheduler_step"):
            self._resume.counts("scheduler_step")
            return float("nan") if metric is None else float(metric)
        recovery, known = self._recovery, self._recovery.metrics
        while recovery.metrics == known and not self._is_stopped:  # a rank that was lost meanwhile begins it again
            self._run(lambda: recovery.note_metric(common_metric(self.worker.group, metric)))
        if self._resume.counts("scheduler_step"):
            self.worker.engine.schedule.step_metric(recovery.metric)
        return recovery.metric

    def evaluate(self, dataset: Any, eval_step: EvalStep, batch_size: int | None = None) -> dict[str, float]:
        """Metrics of this rank's model by itself, at any moment and on any rank, without communication.

        Inside an epoch of cadence or async the replicas differ, and this is this rank's own. To share a test set over
        the devices after every epoch, pass `evaluate=` to Ddp.setup.
        """
        worker, config = self.worker, self.worker.config
        test = take_test_set(dataset, eval_step, 1, batch_size, None, worker.task.loading.collate_fn)
        check_evaluation(test)
        size = test.batch_size or config.batch_size
        feed = make_feed(test.dataset, self.device, config.seed, size, loading=test.loading)
        with self.pause("evaluation"):
            return evaluate(self.model, eval_step, feed, worker.engine.step.precision, SoloGroup())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, `step(loss)` is only `backward(loss)`; the batches of one step are set by `accumulate`, not here."""
        self._steps.no_sync_depth += 1
        try:
            yield
        finally:
            self._steps.no_sync_depth -= 1

    @contextmanager
    def pause(self, what: str = "user code") -> Iterator[None]:
        """Around long work of your own inside an epoch, such as an evaluation: no training time, no deadline."""
        recorder = self.worker.recorder
        if self._resume.iterated is None or recorder.state == "user":  # between epochs all time is the user's already
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
            self._steps.began_ns += spent_ns

    def _leave_epoch(self, why: str, is_sent: bool = True) -> None:
        """The other ranks are told at once, or with this rank's next call."""
        if self._broken is not None or self._state is not None:
            return
        self._steps.drop()
        self._broken = f"{why}: take all batches of ddp.batches(epoch), with one ddp.step(loss) each, or skip_rest()"
        self._is_untold = not is_sent
        if is_sent:
            self._tell_left()

    def _tell_left(self) -> None:
        self._is_untold = False
        if self.world_size > 1:
            with suppress(RuntimeError):  # the other ranks may have ended already
                self._synchronizer.exchange_status(RankStatus.LEFT_EPOCH)
        self._leave()

    def _fail(self, message: str) -> NoReturn:
        """A wrong use on this rank: raise here, and send the status so that the other ranks do not wait."""
        self._leave_epoch(f"rank {self.rank}: {message}")
        raise InputError(message) from None  # it says it all: what it came from is the same, in frames of ours

    def _raise_for_all(self, message: str, kind: type[RankError] = RankError) -> NoReturn:
        self._broken = message
        self._leave()
        raise kind(message) from None

    def _check_usable(self) -> None:
        if self._broken is not None:
            if self._is_untold:
                self._tell_left()
            raise LeftLoopError(self._broken)
        if self._state is not None:
            raise InputError("this loop is finished; call Ddp.setup again to train on")

    def _run(self, action: Callable[[], Any]) -> None:
        """Run what may wait for other ranks."""
        raise NotImplementedError

    def _leave(self) -> None:
        """Close the group without any collective."""
        raise NotImplementedError
