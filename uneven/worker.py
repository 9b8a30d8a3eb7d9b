"""One rank: batch -> step -> tell what happened.

The loop is the program: `Worker.train` reads from top to bottom. Everything the rank does is in exactly one
state of its recorder, so where the time went is never a guess.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from uneven.config import EvalStep, Evaluation, RunConfig, Task
from uneven.data.feed import Feed, make_feed
from uneven.hardware.device import Device
from uneven.hardware.throttle import Throttle
from uneven.policy.axis import Axis, Slot
from uneven.state import TrainedState, capture_state
from uneven.step.eager import EagerStep
from uneven.step.graph import GraphStep
from uneven.step.meter import LossMeter
from uneven.step.precision import Precision
from uneven.step.runahead import RunAhead
from uneven.step.schedule import Schedule
from uneven.step.warmup import no_trace
from uneven.timeline.export import Timeline
from uneven.timeline.record import Recorder
from uneven.timeline.sample import Sampler


class Report(Protocol):
    """Who is told about the run's progress; called on the rank's own thread, so each call must be short."""

    def started(self, axis: Axis, place: str) -> None: ...
    def stepped(self, samples: int, training_s: float, loss: float) -> None: ...
    def epoch_done(self, entry: dict[str, Any]) -> None: ...


class Worker:
    """Life cycle: made on the thread that trains, `train()` once."""

    def __init__(
        self, task: Task, config: RunConfig, device: Device, stop: threading.Event, report: Report
    ) -> None:
        self.recorder = Recorder()
        self.task = task
        self.config = config
        self.device = device
        self.stop = stop
        self.report = report
        self.history: list[dict[str, Any]] = []
        self.axis = Axis(len(task.dataset), config.batch_size * config.accumulate, config.epochs)

        self.on = torch.device(device.torch_name)
        torch.manual_seed(config.seed)
        # Made on the CPU and then moved, so that a seed gives the same model on every device.
        self.model = task.make_model().to(self.on)
        self.model.train()
        self.optimizer = task.make_optimizer(self.model.parameters())
        self.schedule = Schedule(task.make_scheduler, self.optimizer, self.axis.schedule_length)
        self.meter = LossMeter(self.on)
        self.eager = EagerStep(
            self.model,
            self.optimizer,
            task.train_step,
            Precision(config.precision, self.on),
            self.meter,
            config.max_grad_norm,
        )
        self.feed: Feed = make_feed(task.dataset, self.on, config.seed, config.batch_size, config.workers)
        self._test_feed: Feed | None = None
        self.graph: GraphStep | None = None
        self.run_ahead = RunAhead(self.on)
        self.throttle = Throttle(device.speed)
        self._told_s = 0.0

    def train(self) -> TrainedState:
        """Train every slot, or up to the stop request; the state returned is complete either way."""
        sampler = Sampler()
        sampler.start()
        trained = 0
        try:
            with _device_flags(self.on):
                self._warm_up()
                self.report.started(self.axis, self.feed.place)
                stream = self.feed.stream(self.axis.slots())
                self.recorder.enter("data")
                for slot, micros in stream:
                    self._train_slot(slot, micros)
                    trained = slot.index + 1
                    if trained == self.axis.epoch_end(slot.epoch):
                        self._end_epoch(slot.epoch, trained)
                    if self.stop.is_set():
                        self.recorder.event("stop", slot=trained)
                        break
                    self.recorder.enter("data")
                self.recorder.enter("compute")
                self.run_ahead.drain()
        finally:
            self.recorder.close()
            sampler.stop()
        return self._state(trained, Timeline.of(self.recorder, str(self.device), sampler.samples))

    def _train_slot(self, slot: Slot, micros: list[tuple[Any, int]]) -> None:
        if self.graph is None:
            micros = [(self.feed.open(inputs), samples) for inputs, samples in micros]
        began_ns = self.recorder.enter("compute")
        self.schedule.move_to(self.axis.schedule_position(slot.index))
        (self.graph or self.eager)(micros, slot.samples)
        if self.device.speed < 1:
            self.run_ahead.drain()
            self.throttle.pause((self.recorder.clock() - began_ns) / 1e9)
        self.run_ahead.after_step()
        now_ns = self.recorder.enter("other")
        # Ten reports a second are as many as a person can read; each costs a few microseconds.
        if now_ns / 1e9 - self._told_s >= 0.1:
            self._told_s = now_ns / 1e9
            samples = self.axis.samples_before(slot.index) + slot.samples
            self.report.stepped(samples, self.recorder.account().training_s, self.meter.glance())

    def _warm_up(self) -> None:
        """Compile, capture and let CUDA choose its kernels before the training clock starts; leaves no trace.

        Both sizes of slot are run, the full one and an epoch's shorter last one. An eager CPU has nothing to
        warm up.
        """
        if self.config.compile == "off" and self.on.type == "cpu":
            return
        self.recorder.enter("compile")
        if self.config.compile == "default":
            self.model.compile()
        sizes = {
            slot.samples: slot for slot in (self.axis.slot(0), self.axis.slot(self.axis.slots_per_epoch - 1))
        }
        with no_trace(self.eager, self.on):
            for slot, micros in self.feed.stream(sizes.values()):
                self.eager([(self.feed.open(inputs), samples) for inputs, samples in micros], slot.samples)
        if self.config.compile == "graph":
            slot, micros = next(self.feed.stream([self.axis.slot(0)]))
            self.graph = GraphStep(self.eager, self.feed.open, self.on)
            self.graph.capture(micros, slot.samples)
        self.run_ahead.drain()
        self.recorder.enter("setup")

    def _end_epoch(self, epoch: int, trained: int) -> None:
        self.recorder.enter("compute")
        self.run_ahead.drain()
        self.recorder.enter("other")
        seconds = self.recorder.account().training_s
        before = self.history[-1]["train_seconds"] if self.history else 0.0
        entry = {
            "epoch": epoch + 1,
            "samples": self.axis.samples_before(trained),
            "train_loss": self.meter.take(),
            "lr": self.schedule.rates[0],
            "train_seconds": seconds,
            "samples_per_s": self.axis.samples / max(seconds - before, 1e-9),
        }
        is_last = epoch + 1 == self.config.epochs
        evaluation = self.task.evaluation
        if evaluation is not None and (is_last or (epoch + 1) % evaluation.every == 0):
            self.recorder.enter("evaluation")
            entry |= evaluate(
                self.model, evaluation.eval_step, self._eval_feed(evaluation), self.eager.precision
            )
        self.history.append(entry)
        every = self.config.checkpoint_every
        if every is not None and self.config.out is not None and (epoch + 1) % every == 0 and not is_last:
            self.recorder.enter("checkpoint")
            self._state(trained, None).save(self.config.out / f"epoch-{epoch + 1}")
        self.recorder.enter("other")
        self.recorder.event("epoch", **entry)
        self.report.epoch_done(entry)

    def _eval_feed(self, evaluation: Evaluation) -> Feed:
        if self._test_feed is None:
            batch_size = evaluation.batch_size or self.config.batch_size
            self._test_feed = make_feed(evaluation.dataset, self.on, self.config.seed, batch_size)
        return self._test_feed

    def _state(self, trained: int, timeline: Timeline | None) -> TrainedState:
        return TrainedState(
            **capture_state(self.model, self.optimizer),
            history=list(self.history),
            config=self.config.to_json(),
            slot=trained,
            samples=self.axis.samples_before(trained),
            finished=trained == self.axis.total,
            timeline=timeline,
        )


def evaluate(
    model: torch.nn.Module, eval_step: EvalStep, feed: Feed, precision: Precision
) -> dict[str, float]:
    """Metrics of a model over a whole data set: the sums of `eval_step` over their counts, tail included."""
    sums: dict[str, Any] = {}
    total = 0
    was_training = model.training
    model.eval()
    with torch.no_grad(), precision.region():
        for batch, _ in feed.in_order():
            parts, count = eval_step(model, batch)
            for name, value in parts.items():
                sums[name] = sums.get(name, 0) + value
            total += count
    model.train(was_training)
    return {name: float(value) / total for name, value in sums.items()}


@contextmanager
def _device_flags(device: torch.device) -> Iterator[None]:
    """CUDA arithmetic of a run: TF32, and kernels chosen by measuring; put back afterwards."""
    if device.type != "cuda":
        yield
        return
    saved = torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    try:
        with torch.cuda.device(device):
            yield
    finally:
        torch.backends.cudnn.benchmark = saved[0]
        torch.set_float32_matmul_precision(saved[1])
