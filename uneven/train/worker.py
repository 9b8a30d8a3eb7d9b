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

from uneven.comm.collectives import spread
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
from uneven.train.engine import Rig
from uneven.train.gradient_sync import ExactPace
from uneven.train.local_sgd import LocalPace
from uneven.train.rank_info import RankResult, Report, Seat
from uneven.train.synchronizer import Pace

__all__ = ["RankResult", "Seat", "Worker"]


class Worker:
    """Life cycle: made on the thread that trains, `train()` once. `join(model)` forms the group."""

    def __init__(
        self,
        task: Task,
        config: RunConfig,
        seat: Seat,
        join: Callable[[nn.Module], Group],
        stop: threading.Event,
        report: Report,
    ) -> None:
        self.task, self.config, self.seat = task, config, seat
        self.join, self.stop, self.report = join, stop, report
        self.recorder = Recorder(seat.rank)
        self.rig = Rig(task, config, seat, self.recorder)
        self.after_joining: Callable[[Worker], None] = lambda _: None
        self.history: list[dict[str, Any]] = []
        self._said = 0  # of the pace's notes
        self.pace: Pace | None = None
        self._test_feed: Feed | None = None
        self._told_s = 0.0
        self._sampler = Sampler()

    @property
    def axis(self) -> Axis:
        return self.rig.axis

    def train(self) -> RankResult:
        """Train every slot, or up to the stop request; the state returned is complete either way."""
        with self.recording():
            pace = self.prepare()
            self.report.started(self.axis, self.rig.feed.place)
            pace.rejoin()
            for part, micros in self.rig.feed.stream(pace.parts()):
                if self.train_part(pace, part, micros):
                    break
                self.recorder.enter("data")
            pace.conclude()
        return self.result()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """All of the rank's work lies inside; afterwards `result` may be asked."""
        self._sampler.start()
        try:
            with device_flags(self.rig.on):
                yield
        finally:
            self.recorder.close()
            self._sampler.stop()

    def prepare(self) -> Pace:
        """Everything before the first slot: compile and warm up alone, then form the group and meet in round 0."""
        if self.rig.is_rehearsed:
            self.rig.warm_up()
        is_measured = self.rig.is_rehearsed and self.seat.size > 1 and not self.config.is_shared_out
        return self.meet(self.rig.measure() if is_measured else Cost(0.0, 1.0))

    def meet(self, cost: Cost) -> Pace:
        """Form the group; in round 0 rank 0's values become everyone's, and every rank's cost is known to all."""
        self.group = self.join(self.rig.model)
        is_local = self.config.is_local and self.seat.size > 1
        pace: Pace = (LocalPace if is_local else ExactPace)(self.rig, self.group, self.stop.is_set, self._end_epoch)
        self.recorder.enter("communication")
        spread(self.group, (*self.rig.model.parameters(), *self.rig.model.buffers()))
        is_cuda = float(self.rig.on.type == "cuda")
        rows = gather_rows(self.group, (is_cuda, cost.fixed_ms, cost.sample_ms, cost.cap))
        self.rig.has_cuda = any(row[0] for row in rows)
        pace.meet([Cost(*row[1:]) for row in rows])
        if self.seat.rank > 0 and not self.config.is_together:
            torch.manual_seed(self.config.seed + 7919 * self.seat.rank)  # other dropout than rank 0
        self.pace = pace
        self._say_notes(pace)
        self.recorder.enter("setup")
        self.after_joining(self)
        return pace

    def train_part(self, pace: Pace, part: Part, micros: Micros) -> bool:
        """The next part, and ten times a second a word about it; returns whether the run is to stop."""
        is_stopped = pace.train(part, micros)
        now_s = self.recorder.clock() / 1e9
        # Ten reports a second are as many as a person can read; each costs a few microseconds.
        if now_s - self._told_s >= 0.1:
            self._told_s = now_s
            seconds = self.recorder.account().training_s
            samples = self.axis.samples_before(self.rig.trained)
            self.report.stepped(samples, self.rig.samples, seconds, self.rig.meter.glance())
            self._say_notes(pace)
        return is_stopped

    def result(self) -> RankResult:
        if self.rig.on.type == "cuda":
            self.recorder.event("memory", peak_bytes=torch.cuda.max_memory_allocated(self.rig.on))
        timeline = Timeline.of(self.recorder, str(self.seat.device), self._sampler.samples, self.rig.run_ahead.busy)
        return RankResult(self._state(), timeline, self.rig.log, list(self.rig.rounds), self.group.traffic)

    def _say_notes(self, pace: Pace) -> None:
        if len(pace.notes) > self._said:
            self.report.say(pace.notes[self._said :])
            self._said = len(pace.notes)

    def show(self) -> dict[str, Any]:
        """Where the rank is; asked from another thread, at any moment."""
        pace = self.pace.show() if self.pace is not None else {}
        return {"slot": self.rig.trained, "phase": self.recorder.state, "pace": pace}

    def _end_epoch(self, epoch: int, loss: float) -> None:
        """All ranks are past this epoch and, where it is evaluated or saved, hold the same params."""
        self.recorder.enter("other")
        seconds = self.recorder.account().training_s
        before = self.history[-1]["train_seconds"] if self.history else 0.0
        entry = {
            "epoch": epoch + 1,
            "samples": (epoch + 1) * self.axis.samples,
            "train_loss": loss,
            "lr": self.rig.schedule.rates[0],
            "train_seconds": seconds,
            "samples_per_s": self.axis.samples / max(seconds - before, 1e-9),
        }
        assert self.pace is not None, "an epoch ends after round 0"
        evaluation = self.task.evaluation
        if evaluation is not None and self.config.evaluates(epoch, evaluation.every):
            self.recorder.enter("evaluation")
            self.pace.average_buffers()
            entry |= self._evaluate(evaluation, self.pace.ratio())
        self.history.append(entry)
        if self.config.checkpoints(epoch):
            self.recorder.enter("checkpoint")
            self.pace.average_buffers()
            if self.seat.rank == 0 or self.rig.full_state is not None:  # pieces come together from all ranks
                state = self._state()
                if self.seat.rank == 0:
                    assert self.config.out is not None, "checkpoints need a folder"
                    state.save(self.config.out / f"epoch-{epoch + 1}")
        self.recorder.enter("other")
        self.recorder.event("epoch", **entry)
        self.report.epoch_done(entry)

    def _evaluate(self, evaluation: Evaluation, ratio: tuple[int, ...]) -> dict[str, float]:
        batch_size = evaluation.batch_size or self.config.batch_size
        if self._test_feed is None:
            self._test_feed = make_feed(evaluation.dataset, self.rig.on, self.config.seed, batch_size)
        model, precision = self.rig.model, self.rig.eager.precision
        if self.config.is_together:
            return evaluate(model, evaluation.eval_step, self._test_feed, precision, self.group)
        # By speed, as in training; everyone at least one sample, so that all know which metrics there are.
        shares = Fixed(tuple(max(1.0, float(share)) for share in ratio)).shares(0, len(evaluation.dataset))
        first = sum(shares[: self.seat.rank])
        own = (first, first + shares[self.seat.rank])
        # Where a forward needs all ranks, everyone runs as many.
        batches = -(-max(shares) // batch_size) if self.config.strategy == "fsdp" else 0
        return evaluate(model, evaluation.eval_step, self._test_feed, precision, self.group, own, self.stop, batches)

    def _state(self) -> TrainedState:
        trained = self.rig.trained
        return TrainedState(
            **self._tensors(),
            history=list(self.history),
            config=self.config.to_json(),
            slot=trained,
            samples=self.axis.samples_before(trained),
            dataset_samples=self.axis.samples,
            finished=trained == self.axis.total,
            structure=self.rig.structure,
        )

    def _tensors(self) -> dict[str, Any]:
        if self.rig.full_state is None:
            return capture_state(self.rig.model, self.rig.optimizer)
        full = self.rig.full_state()
        return join_state(self.rig.model, self.rig.optimizer, full.model, full.optimizer)
