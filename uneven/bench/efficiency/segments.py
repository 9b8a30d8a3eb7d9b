"""Efficiency, measured inside the ranks: segments of joint training and of solo training in turn.

Machines drift, so a joint run and a solo run minutes apart say little. Here the same processes train jointly for a
moment, then each alone and all at once for a moment, and again; every pair gives one ratio, joint samples/s over the
sum of the solo samples/s. The same shape compares two ways of joint training. All ranks see the same numbers, so all
of them know when there are enough pairs.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from uneven.bench.efficiency.joint import (
    LEAST_STEPS,
    DdpJoint,
    GradientSyncJoint,
    Joint,
    LocalSGDJoint,
    full_parts,
    meet,
    share_out,
)
from uneven.bench.interval import interval
from uneven.comm.gather import gather_bytes
from uneven.train.engine import Engine
from uneven.train.gradient_sync import GradientSync
from uneven.train.local_sgd import LocalSGD
from uneven.train.rank_info import RankInfo
from uneven.train.worker import Worker


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
    delays: list[float] = field(default_factory=list)  # of every merge on every rank, in steps of the slowest rank
    rounds: list[tuple[float, float, float]] = field(default_factory=list)  # on rank 0: ms of wait, transfer, latency
    payload_bytes: int = 0  # a rank's collectives, per step

    def interval(self) -> tuple[float, float]:
        """Mean ratio and the half-width of its 95 % interval."""
        return interval(self.ratios)


def alternate(plan: SegmentPlan, worker: Worker, home: Path) -> None:
    """The program each rank runs in place of training; rank 0 leaves pairs.json."""
    with worker.recording():
        pairs = _measure(plan, worker)
    if worker.rank_info.rank == 0:
        (home / "pairs.json").write_text(json.dumps(asdict(pairs)))


def _measure(plan: SegmentPlan, worker: Worker) -> Pairs:
    solo = None if plan.against_ddp else _solo_rig(worker)
    synchronizer = worker.prepare()
    if plan.is_torch_ddp:
        joint: Joint = DdpJoint(worker)
    elif isinstance(synchronizer, LocalSGD):
        joint = LocalSGDJoint(worker, synchronizer)
    else:
        assert isinstance(synchronizer, GradientSync), "a pace is exact or local"
        joint = GradientSyncJoint(worker, synchronizer)
    other = _ddp_speed(worker) if solo is None else _solo_segment(worker, solo)
    joint.run(0.0)
    other(0.0)
    joint.run(0.0)  # the second one says how long a segment takes
    pairs = Pairs()
    while not _enough(pairs, plan):
        _one_pair(worker, pairs, joint, other, plan.seconds)
        if worker.rank_info.rank == 0:
            worker.report.epoch_done({"pairs": len(pairs.ratios), "interval": pairs.interval()})
    joint.close()
    everyones = gather_bytes(worker.group, json.dumps(pairs.delays).encode())
    pairs.delays = [delay for one in everyones for delay in json.loads(one)]
    return pairs


def _enough(pairs: Pairs, plan: SegmentPlan) -> bool:
    done = len(pairs.ratios)
    return done >= plan.most_pairs or (done >= plan.least_pairs and pairs.interval()[1] <= plan.half_width)


def _one_pair(worker: Worker, pairs: Pairs, joint: Joint, other: Callable[[float], float], seconds: float) -> None:
    size = worker.rank_info.world_size
    meet(worker)
    segment = joint.run(seconds)
    pairs.payload_bytes = segment.payload_bytes // max(1, segment.steps)
    together = sum(share_out(worker, segment.speed))
    meet(worker)
    apart = share_out(worker, other(seconds))
    pairs.joint.append(together)
    pairs.solo.append(apart)
    pairs.ratios.append(together / sum(apart))
    pairs.step_ms.append(1e3 * worker.axis.slot_size / together)
    pairs.shares.append(segment.shares)
    pairs.delays += segment.delays
    pairs.rounds += segment.rounds
    if segment.busy:
        best_s = sum(max(one) for one in segment.busy) / 1e3
        pairs.bounds.append(len(segment.busy) * worker.axis.slot_size / best_s / sum(apart))
        pairs.busy_ms.append([statistics.mean(one[rank] for one in segment.busy) for rank in range(size)])


def _ddp_speed(worker: Worker) -> Callable[[float], float]:
    """A segment of DDP as a speed, each rank's its part of the whole, so that the sum is what all do together."""
    ddp = DdpJoint(worker)

    def run(seconds: float) -> float:
        return ddp.run(seconds).speed

    return run


def _solo_rig(worker: Worker) -> Engine:
    """This rank's device with a model of its own, as one that trains alone would have it, captured step included."""
    engine = Engine(worker.task, worker.config, RankInfo(0, (worker.rank_info.device,)), worker.recorder)
    engine.warm_up()
    return engine


def _solo_segment(worker: Worker, engine: Engine) -> Callable[[float], float]:
    stream = engine.feed.stream(full_parts(worker, worker.config.batch_size, 0))

    def run(seconds: float) -> float:
        samples = steps = 0
        began = time.perf_counter()
        while steps < LEAST_STEPS or time.perf_counter() - began < seconds:
            began_ns = worker.recorder.clock()
            part, micros = next(stream)
            engine.step_alone(part, engine.open(micros), began_ns)
            engine.run_ahead.after_step()
            samples += part.samples
            steps += 1
        engine.run_ahead.drain()
        return samples / (time.perf_counter() - began)

    return run
