"""What bench/ may do with a worker: train in segments that can be timed, train with PyTorch's DDP, evaluate a model.

The one module of train/ that bench/ imports. A segment is a stretch of training of at least some seconds, on all ranks
alike; the same processes can train a segment of one kind, then one of another, and go on with the first. That is how
`uneven bench efficiency` compares two kinds without the drift of the machine between two runs.
Invariant: segments of one kind continue each other (no sample is trained twice), and segments of another kind in
between leave its model alone. Held by tests/bench/test_efficiency.py.
"""

import copy
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, Protocol

import torch
from torch import nn

from uneven.comm.gather import gather_bytes, gather_rows
from uneven.comm.group import SoloGroup
from uneven.config import EvalStep
from uneven.data.feed import make_feed
from uneven.errors import InputError
from uneven.parallel.reference import TorchDdp
from uneven.policy.axis import Part
from uneven.step.eager import DerivedStep, Rows, Stats
from uneven.step.evaluation import evaluate
from uneven.step.finite import OwnCheck
from uneven.step.precision import Precision
from uneven.train.engine import Engine
from uneven.train.gradient_sync import GradientSync, StepStats
from uneven.train.local_sgd import LocalSGD
from uneven.train.prepare import warm_up
from uneven.train.rank_info import RankInfo, RankResult
from uneven.train.worker import Worker

LEAST_STEPS = 3
LEAST_WINDOWS = 3
STOP_CHECK_STEPS = 20  # with PyTorch's DDP: every so many steps ranks agree on a stop request, in a sum of its own

__all__ = [
    "RankResult",
    "Segment",
    "SegmentTrainer",
    "Segments",
    "Worker",
    "evaluate_alone",
    "train_in_segments",
    "train_with_torch_ddp",
]


@dataclass(frozen=True)
class Segment:
    """What one rank did in a segment. The sum of the ranks' speeds is the speed of all of them together."""

    speed: float  # samples/s
    steps: int
    shares: list[int] = field(default_factory=list)
    payload_bytes: int = 0  # sent by this rank, in all
    busy: list[list[float]] = field(default_factory=list)  # per step: every rank's own work, in ms
    delays: list[float] = field(default_factory=list)  # from snapshot to merge, in steps of the slowest rank
    rounds: list[tuple[float, float, float]] = field(default_factory=list)  # ms of wait, transfer and latency


class Segments(Protocol):
    """One kind of training, segment by segment."""

    def run(self, seconds: float) -> Segment:
        """Train at least so long. The first segments are short: how long a step takes is not known yet."""
        ...

    def close(self) -> None: ...


class SegmentTrainer:
    """A rank that trains segments of two kinds in turn: `joint` with all ranks, `reference` to compare it with.

    Life cycle: made by `train_in_segments`, which also ends it. All ranks call the same methods in the same order.
    """

    def __init__(
        self, worker: Worker, joint: Literal["policy", "torch-ddp"], reference: Literal["solo", "torch-ddp"]
    ) -> None:
        self._worker = worker
        # Before the group forms: a captured step must be recorded while nobody waits for this rank.
        solo = _make_solo_engine(worker) if reference == "solo" else None
        synchronizer = worker.prepare()
        if joint == "torch-ddp":
            self.joint: Segments = TorchDdpSegments(worker)
        elif isinstance(synchronizer, LocalSGD):
            self.joint = LocalSGDSegments(worker, synchronizer)
        else:
            assert isinstance(synchronizer, GradientSync), "a synchronizer is GradientSync or LocalSGD"
            self.joint = GradientSyncSegments(worker, synchronizer)
        self.reference: Segments = TorchDdpSegments(worker) if solo is None else SoloSegments(worker, solo)

    @property
    def rank(self) -> int:
        return self._worker.rank_info.rank

    @property
    def world_size(self) -> int:
        return self._worker.rank_info.world_size

    @property
    def slot_size(self) -> int:
        """Samples of one step of all ranks together."""
        return self._worker.axis.slot_size

    def barrier(self) -> None:
        self._worker.group.all_reduce(torch.zeros(1)).wait()

    def all_gather(self, value: float) -> list[float]:
        """Every rank's value, in rank order, on all ranks."""
        return [number for (number,) in gather_rows(self._worker.group, [value])]

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return gather_bytes(self._worker.group, data)

    def report(self, entry: dict[str, Any]) -> None:
        """Show the launcher how far the measurement is."""
        self._worker.report.epoch_done(entry)


@contextmanager
def train_in_segments(
    worker: Worker, joint: Literal["policy", "torch-ddp"], reference: Literal["solo", "torch-ddp"]
) -> Iterator[SegmentTrainer]:
    """A trainer for the program of a rank process; its background threads have ended after the `with` block."""
    with worker.recording():
        trainer = SegmentTrainer(worker, joint, reference)
        yield trainer
        trainer.joint.close()


def train_with_torch_ddp(worker: Worker) -> RankResult:
    """The whole run with the worker's own loop, but PyTorch's DDP sums the gradients."""
    return worker.train(make_step=TorchDdpStep)


def evaluate_alone(
    model: nn.Module, eval_step: EvalStep, dataset: Any, device: torch.device, batch_size: int
) -> dict[str, float]:
    """The metrics of a model in fp32 on a whole data set, by the function that evaluates every run."""
    feed = make_feed(dataset, device, seed=0, batch_size=batch_size)
    return evaluate(model, eval_step, feed, Precision("fp32", device), SoloGroup())


class GradientSyncSegments:
    """Every step a sum of gradients over all ranks."""

    def __init__(self, worker: Worker, synchronizer: GradientSync) -> None:
        self._worker, self._synchronizer = worker, synchronizer
        self._stream = worker.engine.feed.stream(synchronizer.parts())
        self._step_s = 0.0

    def run(self, seconds: float) -> Segment:
        worker, synchronizer = self._worker, self._synchronizer
        steps = _num_steps(seconds, self._step_s)
        busy, samples = [], 0
        sent = worker.group.traffic.payload_bytes
        began = time.perf_counter()
        synchronizer.reset_timer()
        for _ in range(steps):
            part, micros = next(self._stream)
            synchronizer.step(part, micros)  # without `advance`: the end of an epoch is no part of a segment
            samples += part.samples
            busy.append(list(synchronizer.busy_ms))
            worker.recorder.enter("data")
        worker.engine.run_ahead.drain()
        sent = worker.group.traffic.payload_bytes - sent
        elapsed = _max_over_ranks(worker, time.perf_counter() - began)
        self._step_s = elapsed / steps
        return Segment(samples / elapsed, steps, list(synchronizer.ratio()), sent, busy)

    def close(self) -> None: ...


class TorchDdpSegments:
    """PyTorch's DistributedDataParallel with equal batches, on a copy of the model."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        # A copy: otherwise DDP's hooks and those of our reducer would run on the same params.
        model = copy.deepcopy(worker.engine.model)
        optimizer = worker.task.make_optimizer(model.parameters())
        self._ddp = TorchDdp(model, optimizer, worker.task.train_step, worker.config.max_grad_norm)
        self._each = worker.axis.slot(0).samples // worker.rank_info.world_size
        self._stream = worker.engine.feed.stream(_full_parts(worker, self._each, worker.rank_info.rank * self._each))
        self._step_s = 0.0

    def run(self, seconds: float) -> Segment:
        engine = self._worker.engine
        steps = _num_steps(seconds, self._step_s)
        began = time.perf_counter()
        for _ in range(steps):
            began_ns = engine.recorder.clock()
            _, micros = next(self._stream)
            self._ddp.step(engine.feed.open(micros[0][0]))
            engine.simulate_slowdown(began_ns)
            engine.run_ahead.after_step()
        engine.run_ahead.drain()
        elapsed = _max_over_ranks(self._worker, time.perf_counter() - began)
        self._step_s = elapsed / steps
        return Segment(steps * self._each / elapsed, steps, [self._each] * self._worker.rank_info.world_size)

    def close(self) -> None: ...


class LocalSGDSegments:
    """Windows and rounds. A segment ends at a slot of the axis, with a round of all ranks.

    Such a round is part of cadence, but async has none between its own: there a rank's time ends when it has trained
    its last slot of the segment.
    """

    def __init__(self, worker: Worker, synchronizer: LocalSGD) -> None:
        self._worker, self._synchronizer = worker, synchronizer
        self._stream = worker.engine.feed.stream(synchronizer.parts())
        self._slots_per_s = 0.0
        self._length = LEAST_WINDOWS * sum(synchronizer.windows.counts)
        synchronizer.use_segments(lambda slot: slot + self._length)

    def run(self, seconds: float) -> Segment:
        worker, synchronizer = self._worker, self._synchronizer
        least = LEAST_WINDOWS * sum(synchronizer.windows.counts)
        # The end of this segment was fixed when the last one ended; this is the length of the next one.
        self._length = max(least, math.ceil(seconds * self._slots_per_s))
        end = synchronizer.windows.event
        start = synchronizer.windows.start
        known = worker.recorder.event_count
        first, sent = len(worker.engine.state.log), synchronizer.average.traffic.payload_bytes
        began_ns = worker.recorder.clock()
        synchronizer.reset_timer()
        while synchronizer.windows.event == end:
            synchronizer.step(*next(self._stream))
            while synchronizer.advance(0) is not None:
                pass  # rounds that were merged; there are no events
        is_async = worker.config.policy == "async"
        ended_ns = synchronizer.costs.entered_ns if is_async else worker.recorder.clock()
        samples = sum(samples for _, _, samples in worker.engine.state.log[first:])
        # The last round's own time comes after that: it counts here, as the first round's came before `began_ns`.
        own_s = synchronizer.costs.transfer_ms / 1e3 if is_async else 0.0
        seconds = (ended_ns - began_ns) / 1e9 + own_s
        self._slots_per_s = (end - start) / _max_over_ranks(worker, seconds)
        rounds = [event.fields for event in worker.recorder.events_since(known) if event.kind == "round"]
        delays = [fields["delay"] for fields in rounds]
        costs = [(fields["wait_ms"], fields["transfer_ms"], fields["latency_ms"]) for fields in rounds]
        steps, sent = len(worker.engine.state.log) - first, synchronizer.average.traffic.payload_bytes - sent
        return Segment(samples / seconds, steps, list(synchronizer.windows.counts), sent, delays=delays, rounds=costs)

    def close(self) -> None:
        self._synchronizer.close()


class SoloSegments:
    """This rank's device alone, with a model of its own; all ranks run theirs at the same time."""

    def __init__(self, worker: Worker, engine: Engine) -> None:
        self._worker, self._engine = worker, engine
        self._stream = engine.feed.stream(_full_parts(worker, worker.config.batch_size, 0))

    def run(self, seconds: float) -> Segment:
        engine = self._engine
        samples = steps = 0
        began = time.perf_counter()
        while steps < LEAST_STEPS or time.perf_counter() - began < seconds:
            began_ns = self._worker.recorder.clock()
            part, micros = next(self._stream)
            engine.local_step(part, engine.open(micros), began_ns)
            engine.run_ahead.after_step()
            samples += part.samples
            steps += 1
        engine.run_ahead.drain()
        return Segment(samples / (time.perf_counter() - began), steps)

    def close(self) -> None: ...


class TorchDdpStep(DerivedStep):
    """The step of a worker that has joined its group, with gradients averaged by PyTorch's DDP."""

    def __init__(self, worker: Worker) -> None:
        own = worker.engine.step
        super().__init__(own)
        own.close()  # our reducer's hooks leave the params before DDP's come
        self._worker = worker
        self._ddp = TorchDdp(own.model, own.optimizer, own.train_step, own.before_update.max_grad_norm)
        self._steps = 0
        self._ready_ns = 0  # when the last gradient of this rank's own was there
        self._is_waiting = False
        if worker.engine.device.type == "cpu":
            self._ddp.model.register_forward_pre_hook(self._begin_wait)
            own.model.register_forward_pre_hook(self._end_wait)
            for param in own.model.parameters():
                if param.requires_grad:
                    param.register_post_accumulate_grad_hook(self._note_gradient)

    def _begin_wait(self, *_: Any) -> None:
        """Before its forward DDP takes rank 0's buffers, where there are any, and waits for all ranks to come to it."""
        self._is_waiting = True
        self._worker.recorder.enter("wait")

    def _end_wait(self, *_: Any) -> None:
        if self._is_waiting:  # an evaluation calls the model itself
            self._is_waiting = False
            self._worker.recorder.enter("compute")

    def _note_gradient(self, _: torch.Tensor) -> None:
        self._ready_ns = self._worker.recorder.clock()

    def forward_backward(
        self, batches: Sequence[tuple[Any, int]], slot_samples: int, stats: Stats
    ) -> tuple[Rows, list[OwnCheck]]:
        if len(batches) != 1:
            raise InputError("torch-ddp needs at least one sample per rank in every step: choose another batch size")
        ((batch, samples),) = batches
        world_size = self._worker.rank_info.world_size
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.train_step(self._ddp.model, batch)
        self.meter.add(loss.detach() * samples, samples)
        # DDP averages over ranks; a short last slot may be cut into unequal parts, which this factor makes exact.
        (loss * (samples * world_size / slot_samples)).backward()
        if self._ready_ns:  # DDP waits for the other ranks, and for the sum itself, before backward returns
            recorder = self._worker.recorder
            recorder.enter("wait", self._ready_ns)
            recorder.enter("compute")
        own = StepStats._make(stats())
        self._steps += 1
        is_checked = self._steps % STOP_CHECK_STEPS == 0
        # Two ranks that were both asked to stop must not add up to another status.
        status = float(self._worker.group.all_reduce_max(torch.tensor([own.status])).wait()) if is_checked else 0.0
        return [list(own._replace(status=status)) for _ in range(world_size)], []


def _make_solo_engine(worker: Worker) -> Engine:
    """This rank's device with a model of its own, as in a run on this device alone, captured step included."""
    engine = Engine(worker.task, worker.config, RankInfo(0, (worker.rank_info.device,)), worker.recorder)
    warm_up(engine)
    return engine


def _full_parts(worker: Worker, samples: int, first: int) -> Iterator[Part]:
    """Parts of one size, epoch after epoch."""
    for index in count():
        slot = worker.axis.slot(index % worker.axis.total)
        room = worker.axis.samples - samples
        start = (slot.first + first) if slot.first + first <= room else first % max(1, room)
        yield Part(slot, start, samples, samples)


def _max_over_ranks(worker: Worker, value: float) -> float:
    return float(worker.group.all_reduce_max(torch.tensor([value], dtype=torch.float64)).wait())


def _num_steps(seconds: float, step_s: float) -> int:
    return max(LEAST_STEPS, math.ceil(seconds / step_s) if step_s else 0)
