"""Efficiency, measured inside the ranks: segments of joint training and of solo training in turn.

Machines drift, so a joint run and a solo run minutes apart say little. Here the same processes train jointly for a
moment, then each alone and all at once for a moment, and again; every pair gives one ratio, joint samples/s over the
sum of the solo samples/s. The same shape compares two ways of joint training. All ranks see the same numbers, so all
of them know when there are enough pairs.
"""

import copy
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path

import torch

from uneven.parallel.reference import TorchDdp
from uneven.policy.axis import Part
from uneven.step.warmup import no_trace
from uneven.worker import Worker

LEAST_STEPS = 3


@dataclass(frozen=True)
class SegmentPlan:
    """How to measure: segments of at least `seconds`, pairs until the interval is narrow enough."""

    is_torch_ddp: bool = False
    against_ddp: bool = False  # compare with PyTorch's DDP instead of with solo training
    seconds: float = 1.5
    least_pairs: int = 30
    most_pairs: int = 200
    half_width: float = 0.03


@dataclass
class Pairs:
    """What was measured; one entry per pair, speeds in samples/s."""

    ratios: list[float] = field(default_factory=list)
    joint: list[float] = field(default_factory=list)
    solo: list[list[float]] = field(default_factory=list)  # per pair: every rank's
    bounds: list[float] = field(default_factory=list)  # what the split could reach without any communication
    shares: list[list[int]] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    busy_ms: list[list[float]] = field(default_factory=list)  # per pair: every rank's mean own work per step
    payload_bytes: int = 0  # a rank's collectives, per step

    def interval(self) -> tuple[float, float]:
        """Mean ratio and the half-width of its 95 % interval."""
        if len(self.ratios) < 2:
            return (self.ratios[0] if self.ratios else math.nan), math.inf
        width = (1.96 + 2.4 / len(self.ratios)) * statistics.stdev(self.ratios) / math.sqrt(len(self.ratios))
        return statistics.mean(self.ratios), width


def alternate(plan: SegmentPlan, worker: Worker, home: Path) -> None:
    """The program each rank runs in place of training; rank 0 leaves pairs.json."""
    worker.prepare()
    joint = _ddp_segment(worker) if plan.is_torch_ddp else _policy_segment(worker)
    solo = _ddp_speed(worker) if plan.against_ddp else _solo_segment(worker)
    joint(LEAST_STEPS)
    solo(0.0)
    began = time.perf_counter()
    joint(LEAST_STEPS)
    step_s = _highest(worker, (time.perf_counter() - began) / LEAST_STEPS)
    steps = max(LEAST_STEPS, math.ceil(plan.seconds / step_s))
    pairs = Pairs()
    while not _enough(pairs, plan):
        _one_pair(worker, pairs, joint, solo, steps, plan.seconds)
        if worker.seat.rank == 0:
            worker.report.epoch_done({"pairs": len(pairs.ratios), "interval": pairs.interval()})
    if worker.seat.rank == 0:
        (home / "pairs.json").write_text(json.dumps(asdict(pairs)))


def _enough(pairs: Pairs, plan: SegmentPlan) -> bool:
    done = len(pairs.ratios)
    return done >= plan.most_pairs or (done >= plan.least_pairs and pairs.interval()[1] <= plan.half_width)


def _one_pair(
    worker: Worker,
    pairs: Pairs,
    joint: Callable[[int], list[list[float]]],
    solo: Callable[[float], float],
    steps: int,
    seconds: float,
) -> None:
    size = worker.seat.size
    slot = worker.axis.slot(0).samples
    _together(worker)
    sent = worker.group.traffic.payload_bytes
    began = time.perf_counter()
    busy = joint(steps)
    elapsed = time.perf_counter() - began
    pairs.payload_bytes = (worker.group.traffic.payload_bytes - sent) // steps
    elapsed = _highest(worker, elapsed)
    _together(worker)
    speeds = torch.zeros(size, dtype=torch.float64)
    speeds[worker.seat.rank] = solo(seconds)
    total = worker.group.sum_(speeds).wait().tolist()
    pairs.joint.append(steps * slot / elapsed)
    pairs.solo.append(total)
    pairs.ratios.append(steps * slot / elapsed / sum(total))
    pairs.step_ms.append(1e3 * elapsed / steps)
    pairs.shares.append(list(worker.policy.shares(worker.trained, slot)))
    if busy:
        best_s = sum(max(one) for one in busy) / 1e3
        pairs.bounds.append(steps * slot / best_s / sum(total))
        pairs.busy_ms.append([statistics.mean(one[rank] for one in busy) for rank in range(size)])


def _policy_segment(worker: Worker) -> Callable[[int], list[list[float]]]:
    stream = worker.feed.stream(worker.parts())

    def run(steps: int) -> list[list[float]]:
        worker.rejoin()
        busy = []
        for _ in range(steps):
            part, micros = next(stream)
            worker.train_part(part, micros)
            worker.trained = part.slot.index + 1
            busy.append(list(worker.busy_ms))
            worker.recorder.enter("data")
        return busy

    return run


def _ddp_segment(worker: Worker) -> Callable[[int], list[list[float]]]:
    # A copy of its own: DDP's hooks and ours would otherwise meet on the same params.
    model = copy.deepcopy(worker.model)
    optimizer = worker.task.make_optimizer(model.parameters())
    ddp = TorchDdp(model, optimizer, worker.task.train_step, worker.config.max_grad_norm)
    size, rank = worker.seat.size, worker.seat.rank
    each = worker.axis.slot(0).samples // size
    stream = worker.feed.stream(_parts(worker, each, rank * each))

    def run(steps: int) -> list[list[float]]:
        for _ in range(steps):
            began_ns = worker.recorder.clock()
            _, micros = next(stream)
            ddp.step(worker.feed.open(micros[0][0]))
            worker.slow_down(began_ns)
        return []

    return run


def _ddp_speed(worker: Worker) -> Callable[[float], float]:
    """A segment of DDP as a speed, each rank's its part of the whole, so that the sum is what all do together."""
    run_steps = _ddp_segment(worker)
    each = worker.axis.slot(0).samples // worker.seat.size

    def run(seconds: float) -> float:
        run_steps(LEAST_STEPS)
        began = time.perf_counter()
        run_steps(LEAST_STEPS)
        steps = max(LEAST_STEPS, math.ceil(seconds / _highest(worker, (time.perf_counter() - began) / LEAST_STEPS)))
        began = time.perf_counter()
        run_steps(steps)
        return steps * each / _highest(worker, time.perf_counter() - began)

    return run


def _solo_segment(worker: Worker) -> Callable[[float], float]:
    stream = worker.feed.stream(_parts(worker, worker.config.batch_size, 0))

    def run(seconds: float) -> float:
        road, worker.eager.road = worker.eager.road, None
        samples = steps = 0
        with no_trace(worker.eager, worker.on):
            began = time.perf_counter()
            while steps < LEAST_STEPS or time.perf_counter() - began < seconds:
                began_ns = worker.recorder.clock()
                part, micros = next(stream)
                worker.eager([(worker.feed.open(inputs), n) for inputs, n in micros], part.samples)
                worker.slow_down(began_ns)
                samples += part.samples
                steps += 1
            elapsed = time.perf_counter() - began
        worker.eager.road = road
        return samples / elapsed

    return run


def _parts(worker: Worker, samples: int, first: int) -> Iterator[Part]:
    """Full parts of one size, over and over."""
    for index in count():
        slot = worker.axis.slot(index % worker.axis.total)
        room = worker.axis.samples - samples
        start = (slot.first + first) if slot.first + first <= room else first % max(1, room)
        yield Part(slot, start, samples, samples)


def _together(worker: Worker) -> None:
    worker.group.sum_(torch.zeros(1)).wait()


def _highest(worker: Worker, value: float) -> float:
    return float(worker.group.max_(torch.tensor([value], dtype=torch.float64)).wait())
