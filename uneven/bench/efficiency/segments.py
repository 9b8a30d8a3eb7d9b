"""The part of `uneven bench efficiency` that runs in the ranks: alternating segments of joint and solo training.

A machine's speed drifts, so a joint and a solo run minutes apart cannot be compared. Here the same processes train
jointly for a moment, then each by itself (all at the same time), and so on. Every pair gives one ratio: joint samples/s
over the sum of the solo samples/s. Two kinds of joint training are compared in the same way. Invariant: all ranks know
the same numbers, so all stop after the same pair.
"""

import json
import os
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from uneven.bench.interval import interval
from uneven.hardware.interference import measure_interference
from uneven.train.segment import Segment, SegmentTrainer, Worker, train_in_segments


@dataclass(frozen=True)
class SegmentPlan:
    """Segments last at least `seconds`; pairs are added until the interval is at most `half_width` wide each way."""

    joint: Literal["policy", "torch-ddp"] = "policy"
    reference: Literal["solo", "torch-ddp"] = "solo"
    seconds: float = 1.5
    least_pairs: int = 30
    most_pairs: int = 200
    half_width: float = 0.03


@dataclass
class Pairs:
    """The measurements: lists have one entry per pair, speeds are in samples/s."""

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
    repeated: int = 0  # disturbed pairs that were measured again
    disturbed: list[dict[str, Any]] = field(default_factory=list)  # interference of pairs disturbed twice

    def interval(self) -> tuple[float, float]:
        """Mean ratio and the half-width of its 95 % interval."""
        return interval(self.ratios)


def alternate(plan: SegmentPlan, worker: Worker, folder: Path) -> None:
    """The program of every rank; rank 0 writes pairs.json into its folder."""
    with train_in_segments(worker, plan.joint, plan.reference) as trainer:
        pairs = _measure(plan, trainer)
    if trainer.rank == 0:
        (folder / "pairs.json").write_text(json.dumps(asdict(pairs)))


def _measure(plan: SegmentPlan, trainer: SegmentTrainer) -> Pairs:
    trainer.joint.run(0.0)
    trainer.reference.run(0.0)
    trainer.joint.run(0.0)  # again, because a segment's length is fixed by the one before it
    pairs = Pairs()
    while not _is_enough(pairs, plan):
        segment, solo = _run_pair(trainer, pairs, plan.seconds)
        _add_pair(trainer, pairs, segment, solo)
        if trainer.rank == 0:
            trainer.report({"pairs": len(pairs.ratios), "interval": pairs.interval()})
    by_rank = trainer.all_gather_bytes(json.dumps(pairs.delays).encode())
    pairs.delays = [delay for delays in by_rank for delay in json.loads(delays)]
    return pairs


def _is_enough(pairs: Pairs, plan: SegmentPlan) -> bool:
    done = len(pairs.ratios)
    return done >= plan.most_pairs or (done >= plan.least_pairs and pairs.interval()[1] <= plan.half_width)


def _run_pair(trainer: SegmentTrainer, pairs: Pairs, seconds: float) -> tuple[Segment, list[float]]:
    """One joint segment and one of the reference; measured once more if other programs disturbed them."""
    for attempt in (1, 2):
        with measure_interference(os.getppid()) as span:  # the launcher: its ranks are not foreign
            trainer.barrier()
            segment = trainer.joint.run(seconds)
            trainer.barrier()
            solo = trainer.all_gather(trainer.reference.run(seconds).speed)
        # Rank 0 decides for all ranks, which must repeat the same pairs.
        is_disturbed = trainer.all_gather(float(span.interference.is_disturbed))[0] > 0
        if not is_disturbed:
            break
        if attempt == 1:
            pairs.repeated += 1
        else:
            pairs.disturbed.append(span.interference.to_json())
    return segment, solo


def _add_pair(trainer: SegmentTrainer, pairs: Pairs, segment: Segment, solo: list[float]) -> None:
    pairs.payload_bytes = segment.payload_bytes // max(1, segment.steps)
    together = sum(trainer.all_gather(segment.speed))
    pairs.joint.append(together)
    pairs.solo.append(solo)
    pairs.ratios.append(together / sum(solo))
    pairs.step_ms.append(1e3 * trainer.slot_size / together)
    pairs.shares.append(segment.shares)
    pairs.delays += segment.delays
    pairs.rounds += segment.rounds
    if segment.busy:
        best_s = sum(max(step) for step in segment.busy) / 1e3
        pairs.bounds.append(len(segment.busy) * trainer.slot_size / best_s / sum(solo))
        ranks = range(trainer.world_size)
        pairs.busy_ms.append([statistics.mean(step[rank] for step in segment.busy) for rank in ranks])
