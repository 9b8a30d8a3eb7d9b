"""Segments of joint training, one kind per way of keeping together. Each can be run again and again, in turn with
segments of something else, by the same processes."""

import copy
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import torch

from uneven.comm.gather import gather_rows
from uneven.parallel.reference import TorchDdp
from uneven.policy.axis import Part
from uneven.train.gradient_sync import GradientSync
from uneven.train.local_sgd import LocalSGD
from uneven.train.worker import Worker

LEAST_STEPS = 3
LEAST_WINDOWS = 3


@dataclass(frozen=True)
class Segment:
    """What one rank did in a segment: the ranks' speeds add up to what they do together."""

    speed: float  # samples/s
    steps: int
    shares: list[int]
    payload_bytes: int = 0  # what this rank sent, in all
    busy: list[list[float]] = field(default_factory=list)  # per step: every rank's own work, in ms
    delays: list[float] = field(default_factory=list)
    rounds: list[tuple[float, float, float]] = field(default_factory=list)  # ms of wait, transfer and latency


class Joint(Protocol):
    """A way of joint training. `run` takes at least so many seconds, on all ranks alike."""

    def run(self, seconds: float) -> Segment: ...
    def close(self) -> None: ...


class GradientSyncJoint:
    """Every step a sum of gradients."""

    def __init__(self, worker: Worker, synchronizer: GradientSync) -> None:
        self._worker, self._synchronizer = worker, synchronizer
        self._stream = worker.engine.feed.stream(synchronizer.parts())
        self._step_s = 0.0

    def run(self, seconds: float) -> Segment:
        worker, synchronizer = self._worker, self._synchronizer
        steps = _steps(seconds, self._step_s)
        busy, samples = [], 0
        sent = worker.group.traffic.payload_bytes
        began = time.perf_counter()
        synchronizer.reset_timer()
        for _ in range(steps):
            part, micros = next(self._stream)
            synchronizer.step(part, micros)
            samples += part.samples
            busy.append(list(synchronizer.busy_ms))
            worker.recorder.enter("data")
        worker.engine.run_ahead.drain()
        sent = worker.group.traffic.payload_bytes - sent
        elapsed = highest(worker, time.perf_counter() - began)
        self._step_s = elapsed / steps
        shares = list(synchronizer.policy.shares(worker.engine.trained, worker.axis.slot(0).samples))
        return Segment(samples / elapsed, steps, shares, sent, busy)

    def close(self) -> None: ...


class DdpJoint:
    """PyTorch's DistributedDataParallel with equal batches, on a copy of the model."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        # A copy of its own: DDP's hooks and ours would otherwise meet on the same params.
        model = copy.deepcopy(worker.engine.model)
        optimizer = worker.task.make_optimizer(model.parameters())
        self._ddp = TorchDdp(model, optimizer, worker.task.train_step, worker.config.max_grad_norm)
        self._each = worker.axis.slot(0).samples // worker.rank_info.world_size
        self._stream = worker.engine.feed.stream(full_parts(worker, self._each, worker.rank_info.rank * self._each))
        self._step_s = 0.0

    def run(self, seconds: float) -> Segment:
        engine = self._worker.engine
        steps = _steps(seconds, self._step_s)
        began = time.perf_counter()
        for _ in range(steps):
            began_ns = engine.recorder.clock()
            _, micros = next(self._stream)
            self._ddp.step(engine.feed.open(micros[0][0]))
            engine.slow_down(began_ns)
            engine.run_ahead.after_step()
        engine.run_ahead.drain()
        elapsed = highest(self._worker, time.perf_counter() - began)
        self._step_s = elapsed / steps
        return Segment(steps * self._each / elapsed, steps, [self._each] * self._worker.rank_info.world_size)

    def close(self) -> None: ...


class LocalSGDJoint:
    """Windows and rounds. A segment ends at a slot of the axis, where all ranks meet.

    Such a meeting is part of cadence, but async knows none between its rounds: there a rank's time ends when it has
    trained its last slot of the segment.
    """

    def __init__(self, worker: Worker, synchronizer: LocalSGD) -> None:
        self._worker, self._synchronizer = worker, synchronizer
        self._stream = worker.engine.feed.stream(synchronizer.parts())
        self._slots_per_s = 0.0
        self._length = LEAST_WINDOWS * sum(synchronizer.windows.counts)
        synchronizer.end_epoch = lambda *_: None  # epochs end in the middle of segments and are nobody's business here
        synchronizer.windows.next_event = lambda slot: slot + self._length
        synchronizer.windows.event = self._length

    def run(self, seconds: float) -> Segment:
        worker, synchronizer = self._worker, self._synchronizer
        least = LEAST_WINDOWS * sum(synchronizer.windows.counts)
        # The end of this segment is fixed already; this is the length of the next one.
        self._length = max(least, math.ceil(seconds * self._slots_per_s))
        end, start, known = synchronizer.windows.event, synchronizer.windows.start, len(worker.recorder.events)
        first, sent = len(worker.engine.log), synchronizer.average.traffic.payload_bytes
        began_ns = worker.recorder.clock()
        synchronizer.reset_timer()
        while synchronizer.windows.event == end:
            synchronizer.train(*next(self._stream))
        is_async = worker.config.policy == "async"
        ended_ns = synchronizer.entered_ns if is_async else worker.recorder.clock()
        samples = sum(samples for _, _, samples in worker.engine.log[first:])
        # The last round's own time comes after that: one in so many, as the first one's came before.
        own_s = synchronizer.transfer_ms / 1e3 if is_async else 0.0
        seconds = (ended_ns - began_ns) / 1e9 + own_s
        self._slots_per_s = (end - start) / highest(worker, seconds)
        rounds = [event.fields for event in worker.recorder.events[known:] if event.kind == "round"]
        delays = [one["delay"] for one in rounds]
        costs = [(one["wait_ms"], one["transfer_ms"], one["latency_ms"]) for one in rounds]
        steps, sent = len(worker.engine.log) - first, synchronizer.average.traffic.payload_bytes - sent
        return Segment(samples / seconds, steps, list(synchronizer.windows.counts), sent, delays=delays, rounds=costs)

    def close(self) -> None:
        self._synchronizer.average.close()


def full_parts(worker: Worker, samples: int, first: int) -> Iterator[Part]:
    """Full parts of one size, over and over."""
    for index in count():
        slot = worker.axis.slot(index % worker.axis.total)
        room = worker.axis.samples - samples
        start = (slot.first + first) if slot.first + first <= room else first % max(1, room)
        yield Part(slot, start, samples, samples)


def meet(worker: Worker) -> None:
    worker.group.all_reduce(torch.zeros(1)).wait()


def highest(worker: Worker, value: float) -> float:
    return float(worker.group.all_reduce_max(torch.tensor([value], dtype=torch.float64)).wait())


def share_out(worker: Worker, value: float) -> list[float]:
    """Every rank's value, on all ranks."""
    return [one for (one,) in gather_rows(worker.group, [value])]


def _steps(seconds: float, step_s: float) -> int:
    return max(LEAST_STEPS, math.ceil(seconds / step_s) if step_s else 0)
