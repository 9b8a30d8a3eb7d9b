"""One rank: batch -> step -> tell the policy -> (with several ranks) sum or average over all.

The loop is the program: `Worker.train` reads from top to bottom. Everything the rank does is in exactly one state of
its recorder, so where the time went is never a guess. The rig is the rank by itself; the pace is how it keeps
together with the others: by a sum of gradients at every step (exact), or by an average of params now and then (local).
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from uneven.comm.collectives import broadcast_params
from uneven.comm.gather import gather_rows
from uneven.comm.group import Group
from uneven.config import Evaluation, RunConfig, Task
from uneven.data.feed import Feed, Micros, make_feed
from uneven.policy.axis import Axis, Part
from uneven.policy.exact import Fixed
from uneven.policy.finish import Cost
from uneven.results.state import TrainedState, capture_state, join_state
from uneven.step.evaluation import evaluate
from uneven.step.precision import device_flags
from uneven.timeline.export import Timeline
from uneven.timeline.record import Recorder
from uneven.timeline.sample import Sampler
from uneven.train.apply_strategy import choose_activations
from uneven.train.engine import Engine
from uneven.train.gradient_sync import GradientSync
from uneven.train.local_sgd import LocalSGD
from uneven.train.rank_info import RankInfo, RankResult, Report
from uneven.train.synchronizer import Synchronizer

__all__ = ["RankInfo", "RankResult", "Worker"]


class Worker:
    """Life cycle: made on the thread that trains, `train()` once. `join(model)` forms the group."""

    def __init__(
        self,
        task: Task,
        config: RunConfig,
        rank_info: RankInfo,
        join: Callable[[nn.Module], Group],
        stop: threading.Event,
        report: Report,
    ) -> None:
        self.task, self.config, self.rank_info = task, config, rank_info
        self.join, self.stop, self.report = join, stop, report
        self.recorder = Recorder(rank_info.rank)
        self.engine = Engine(task, config, rank_info, self.recorder)
        self.after_joining: Callable[[Worker], None] = lambda _: None
        self.history: list[dict[str, Any]] = []
        self._said = 0  # of the pace's notes
        self.synchronizer: Synchronizer | None = None
        self._test_feed: Feed | None = None
        self._told_s = 0.0
        self._sampler = Sampler()

    @property
    def axis(self) -> Axis:
        return self.engine.axis

    def train(self) -> RankResult:
        """Train every slot, or up to the stop request; the state returned is complete either way."""
        with self.recording():
            synchronizer = self.prepare()
            self.report.started(self.axis, self.engine.feed.place)
            synchronizer.reset_timer()
            for part, micros in self.engine.feed.stream(synchronizer.parts()):
                if self.train_part(synchronizer, part, micros):
                    break
                self.recorder.enter("data")
            synchronizer.finalize()
        return self.result()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """All of the rank's work lies inside; afterwards `result` may be asked."""
        self._sampler.start()
        try:
            with device_flags(self.engine.on):
                yield
        finally:
            self.recorder.close()
            self._sampler.stop()

    def prepare(self) -> Synchronizer:
        """Everything before the first slot: compile and warm up alone, then form the group and meet in round 0."""
        if lines := choose_activations(self.engine):
            self.report.say(lines)
        if self.engine.is_rehearsed:
            self.engine.warm_up()
        is_measured = self.engine.is_rehearsed and self.rank_info.world_size > 1 and not self.config.has_fixed_shares
        return self.meet(self.engine.measure() if is_measured else Cost(0.0, 1.0))

    def meet(self, cost: Cost) -> Synchronizer:
        """Form the group; in round 0 rank 0's values become everyone's, and every rank's cost is known to all."""
        self.group = self.join(self.engine.model)
        is_local = self.config.is_local and self.rank_info.world_size > 1
        synchronizer: Synchronizer = (LocalSGD if is_local else GradientSync)(
            self.engine, self.group, self.stop.is_set, self._end_epoch
        )
        self.recorder.enter("communication")
        broadcast_params(self.group, (*self.engine.model.parameters(), *self.engine.model.buffers()))
        is_cuda = float(self.engine.on.type == "cuda")
        rows = gather_rows(self.group, (is_cuda, cost.fixed_ms, cost.sample_ms, cost.cap))
        self.engine.has_cuda = any(row[0] for row in rows)
        synchronizer.meet([Cost(*row[1:]) for row in rows])
        if self.rank_info.rank > 0 and not self.config.is_model_parallel:
            torch.manual_seed(self.config.seed + 7919 * self.rank_info.rank)  # other dropout than rank 0
        self.synchronizer = synchronizer
        self._say_notes(synchronizer)
        self.recorder.enter("setup")
        self.after_joining(self)
        return synchronizer

    def train_part(self, synchronizer: Synchronizer, part: Part, micros: Micros) -> bool:
        """The next part, and ten times a second a word about it; returns whether the run is to stop."""
        is_stopped = synchronizer.train(part, micros)
        now_s = self.recorder.clock() / 1e9
        # Ten reports a second are as many as a person can read; each costs a few microseconds.
        if now_s - self._told_s >= 0.1:
            self._told_s = now_s
            seconds = self.recorder.account().training_s
            samples = self.axis.samples_before(self.engine.trained)
            self.report.stepped(samples, self.engine.samples, seconds, self.engine.meter.glance())
            self._say_notes(synchronizer)
        return is_stopped

    def result(self) -> RankResult:
        if self.engine.on.type == "cuda":
            self.recorder.event("memory", peak_bytes=torch.cuda.max_memory_allocated(self.engine.on))
        timeline = Timeline.of(
            self.recorder, str(self.rank_info.device), self._sampler.samples, self.engine.run_ahead.busy
        )
        return RankResult(self._state(), timeline, self.engine.log, list(self.engine.rounds), self.group.traffic)

    def _say_notes(self, synchronizer: Synchronizer) -> None:
        if len(synchronizer.notes) > self._said:
            self.report.say(synchronizer.notes[self._said :])
            self._said = len(synchronizer.notes)

    def show(self) -> dict[str, Any]:
        """Where the rank is; asked from another thread, at any moment."""
        synchronizer = self.synchronizer.show() if self.synchronizer is not None else {}
        return {"slot": self.engine.trained, "phase": self.recorder.state, "pace": synchronizer}

    def _end_epoch(self, epoch: int, loss: float) -> None:
        """All ranks are past this epoch and, where it is evaluated or saved, hold the same params."""
        self.recorder.enter("other")
        seconds = self.recorder.account().training_s
        before = self.history[-1]["train_seconds"] if self.history else 0.0
        entry = {
            "epoch": epoch + 1,
            "samples": (epoch + 1) * self.axis.samples,
            "train_loss": loss,
            "lr": self.engine.schedule.rates[0],
            "train_seconds": seconds,
            "samples_per_s": self.axis.samples / max(seconds - before, 1e-9),
        }
        assert self.synchronizer is not None, "an epoch ends after round 0"
        evaluation = self.task.evaluation
        if evaluation is not None and self.config.evaluates(epoch, evaluation.every):
            self.recorder.enter("evaluation")
            self.synchronizer.average_buffers()
            entry |= self._evaluate(evaluation, self.synchronizer.ratio())
        self.history.append(entry)
        if self.config.checkpoints(epoch):
            self.recorder.enter("checkpoint")
            self.synchronizer.average_buffers()
            if self.rank_info.rank == 0 or self.engine.full_state is not None:  # pieces come together from all ranks
                state = self._state()
                if self.rank_info.rank == 0:
                    assert self.config.out is not None, "checkpoints need a folder"
                    state.save(self.config.out / f"epoch-{epoch + 1}")
        self.recorder.enter("other")
        self.recorder.event("epoch", **entry)
        self.report.epoch_done(entry)

    def _evaluate(self, evaluation: Evaluation, ratio: tuple[int, ...]) -> dict[str, float]:
        batch_size = evaluation.batch_size or self.config.batch_size
        if self._test_feed is None:
            self._test_feed = make_feed(evaluation.dataset, self.engine.on, self.config.seed, batch_size)
        model, precision = self.engine.model, self.engine.eager.precision
        if self.config.is_model_parallel:
            return evaluate(model, evaluation.eval_step, self._test_feed, precision, self.group)
        # By speed, as in training; everyone at least one sample, so that all know which metrics there are.
        shares = Fixed(tuple(max(1.0, float(share)) for share in ratio)).shares(0, len(evaluation.dataset))
        first = sum(shares[: self.rank_info.rank])
        own = (first, first + shares[self.rank_info.rank])
        # Where a forward needs all ranks, everyone runs as many.
        batches = -(-max(shares) // batch_size) if self.config.strategy == "fsdp" else 0
        return evaluate(model, evaluation.eval_step, self._test_feed, precision, self.group, own, self.stop, batches)

    def _state(self) -> TrainedState:
        trained = self.engine.trained
        return TrainedState(
            **self._tensors(),
            history=list(self.history),
            config=self.config.to_json(),
            slot=trained,
            samples=self.axis.samples_before(trained),
            dataset_samples=self.axis.samples,
            finished=trained == self.axis.total,
            structure=self.engine.structure,
        )

    def _tensors(self) -> dict[str, Any]:
        if self.engine.full_state is None:
            return capture_state(self.engine.model, self.engine.optimizer)
        full = self.engine.full_state()
        return join_state(self.engine.model, self.engine.optimizer, full.model, full.optimizer)
