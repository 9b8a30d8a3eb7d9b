"""What the user may call beside batches and steps: numbers for the history, metrics, an evaluation, a pause."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from uneven.api.epoch_log import EpochLog, common_metric
from uneven.api.loop_resume import CheckpointCalls
from uneven.api.loop_survival import LoopSurvival
from uneven.comm.group import SoloGroup
from uneven.config import EvalStep, check_evaluation
from uneven.data.feed import make_feed
from uneven.data.user_loader import take_test_set
from uneven.step.evaluation import evaluate


class LoopCalls(CheckpointCalls):
    """The part of Loop (api/loop.py) that trains nothing."""

    _iterated: int | None
    _log: EpochLog
    _survival: LoopSurvival

    def log(self, **values: Any) -> None:
        """Numbers for this epoch's entry in the history: means over all ranks, weighted by the samples of the batch.

        Between epochs they belong to the last one, and the ranks that log them count alike.
        """
        if self._is_stopped:
            return
        self._check_usable()
        if self._iterated is None and self._resume.counts("log"):
            self._log.add(max(0, self._synchronizer.epoch - 1), values, 1.0, self.worker.callbacks.metrics)
            self._log.keep()
        elif self._iterated is not None and not self._steps.is_void:
            self._log.add(self._iterated, values, float(self._steps.samples), self.worker.callbacks.metrics)

    def scheduler_step(self, metric: Any = None) -> float:
        """Between epochs, on all ranks: feed an evaluated metric to the run's ReduceLROnPlateau; returns the metric.

        A rank that has not evaluated it passes None. All ranks use the mean of what was passed, so that their learning
        rates stay the same. What a resumed run was fed before its checkpoint is not fed again.
        """
        if self._is_stopped:
            return float("nan") if metric is None else float(metric)
        self._check_usable()
        if self._iterated is not None:
            self._fail("ddp.scheduler_step(metric) belongs between epochs, where all ranks call it together")
        if self._resume.is_past("scheduler_step"):
            self._resume.counts("scheduler_step")
            return float("nan") if metric is None else float(metric)
        survival, known = self._survival, self._survival.metrics
        while survival.metrics == known and not self._is_stopped:  # a rank that was lost meanwhile begins it again
            self._run(lambda: survival.note_metric(common_metric(self.worker.group, metric)))
        if self._resume.counts("scheduler_step"):
            self.worker.engine.schedule.step_metric(survival.metric)
        return survival.metric

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
            return evaluate(self.model, eval_step, feed, worker.engine.eager.precision, SoloGroup())

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
        if self._iterated is None or recorder.state == "user":  # between epochs all time is the user's already
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

    def _run(self, action: Callable[[], Any]) -> None:
        """Run what may wait for other ranks."""
        raise NotImplementedError
