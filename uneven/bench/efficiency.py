"""`uneven bench efficiency`: joint samples/s over the sum of the devices' solo samples/s, as a paired ratio.

The project's main figure. Called by cli/bench.py. A machine's speed drifts, so a joint and a solo run minutes apart
cannot be compared. Here the same processes train jointly for a moment, then each by itself (all at the same time), and
so on. Every pair of such segments gives one ratio. Two kinds of joint training are compared in the same way. The result
has the figure and its interval, the measured gap, the most that equal-batch DDP could reach, the most that the split in
use could reach without communication (its bound), and how the rest of a step is spent. Invariant: all ranks know the
same numbers, so all stop after the same pair.
"""

import json
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from uneven.bench import models
from uneven.bench.interval import interval
from uneven.bench.orders import EfficiencyOrder, Order
from uneven.bench.single.run import make_task
from uneven.bench.undisturbed import FOOTNOTE, mark
from uneven.config import RunConfig, resolve
from uneven.errors import InputError
from uneven.hardware.device import parse_devices
from uneven.hardware.interference import measure_interference
from uneven.hardware.yardstick import Yardstick
from uneven.launch.checks.preflight import resolve_auto
from uneven.launch.launcher import run_ranks
from uneven.results.progress import Reporter
from uneven.train.requests import Requests
from uneven.train.segment import Segment, SegmentTrainer, Worker, train_in_segments

POLICIES = ("sync", "balanced", "cadence", "async", "torch-ddp")
Kind = Literal["policy", "torch-ddp"]
FOREVER = 10**6  # epochs: the measurement ends when the interval is narrow enough
MAX_DISTURBED = 0.1  # of the pairs: both segments of a pair are disturbed alike, so a few hardly move the mean


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


@dataclass(frozen=True)
class Delays:
    """The time from a rank's snapshot to its merge, in steps of the slowest rank."""

    rounds: int
    mean: float
    p99: float
    max: float

    @classmethod
    def of(cls, delays: list[float]) -> "Delays | None":
        ordered = sorted(delays)
        late = ordered[int(0.99 * (len(ordered) - 1))] if ordered else 0.0
        return cls(len(ordered), statistics.mean(ordered), late, ordered[-1]) if ordered else None


@dataclass(frozen=True)
class RoundTimes:
    """Of a round on rank 0, in ms: waiting, the rank's own time for it, and from snapshot to average."""

    wait: float
    transfer: float
    latency: float


@dataclass(frozen=True)
class DisturbedPairs:
    """What other programs did to the pairs."""

    repeated_pairs: int
    disturbed_pairs: int
    last: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The result of a measurement, as it is printed and written."""

    version: int = 1
    model: str
    policy: str
    against_ddp: bool
    devices: str
    batch_size: int
    precision: str
    compile: str
    backend: str
    efficiency: float
    half_width: float | None  # of the 95 % interval; one pair has none
    pairs: int
    gap: float
    ddp_bound: float
    split_bound: float | None  # the most that the split in use could reach
    solo_samples_per_s: list[float]
    joint_samples_per_s: float
    step_ms: float
    busy_ms: list[float]
    shares: list[int]  # samples, or batches of a window
    payload_bytes_per_step: int | None
    merge_delay: Delays | None
    round_ms: RoundTimes | None
    ratios: list[float]
    is_disturbed: bool
    interference: DisturbedPairs


def measure_efficiency(order: EfficiencyOrder, reporter: Reporter) -> Efficiency:
    """Start the ranks, which measure the pairs, and summarise them."""
    if order.policy not in POLICIES:
        raise InputError(f"policy {order.policy!r} must be one of {', '.join(POLICIES)}")
    if (order.against_ddp or order.policy == "torch-ddp") and order.precision != "fp32":
        raise InputError(f"precision={order.precision!r} with PyTorch's DDP: it is measured in fp32; leave it out")
    if order.against_ddp and order.compile != "off":
        raise InputError(
            f"compile={order.compile!r} with --against-ddp: DDP runs eagerly, and so must ours; leave it out"
        )
    devices = parse_devices(order.devices)
    if len(devices) < 2:
        raise InputError(f"devices {order.devices!r}: efficiency needs at least two, as in cpu,cpu@0.4")
    task = replace(make_task(Order(model=order.model, data=order.data)), make_scheduler=None, evaluation=None)
    config = resolve(
        {
            "batch_size": models.get(order.model).batch_size if order.batch_size is None else order.batch_size,
            "epochs": FOREVER,
            "policy": "sync" if order.policy == "torch-ddp" else order.policy,
            "precision": order.precision,
            "compile": "off" if order.policy == "torch-ddp" else order.compile,
            "backend": order.backend,
        }
    )
    config, _ = resolve_auto(config, devices)
    if config.slot_size(len(devices)) > len(task.dataset):
        raise InputError(f"batch size {config.batch_size} on {len(devices)} devices is more than the data set has")
    pairs = run_ranks((task, config, partial(alternate, order)), devices, Requests(), reporter, _read)
    return summarise(order, config, pairs)


def _read(folder: Path) -> Pairs:
    return Pairs(**json.loads((folder / "result-0" / "pairs.json").read_text()))


def alternate(order: EfficiencyOrder, worker: Worker, folder: Path) -> None:
    """The program of every rank; rank 0 writes pairs.json into its folder."""
    joint: Kind = "torch-ddp" if order.policy == "torch-ddp" else "policy"
    with train_in_segments(worker, joint, "torch-ddp" if order.against_ddp else "solo") as trainer:
        pairs = _measure(order, trainer)
    if trainer.rank == 0:
        (folder / "pairs.json").write_text(json.dumps(asdict(pairs)))


def _measure(order: EfficiencyOrder, trainer: SegmentTrainer) -> Pairs:
    trainer.joint.run(0.0)
    trainer.reference.run(0.0)
    trainer.joint.run(0.0)  # again, because a segment's length is fixed by the one before it
    pairs = Pairs()
    while not _is_enough(pairs, order):
        segment, solo = _run_pair(trainer, pairs, order.seconds)
        _add_pair(trainer, pairs, segment, solo)
        if trainer.rank == 0:
            trainer.report({"pairs": len(pairs.ratios), "interval": pairs.interval()})
    by_rank = trainer.all_gather_bytes(json.dumps(pairs.delays).encode())
    pairs.delays = [delay for delays in by_rank for delay in json.loads(delays)]
    return pairs


def _is_enough(pairs: Pairs, order: EfficiencyOrder) -> bool:
    done = len(pairs.ratios)
    return done >= order.most_pairs or (done >= order.least_pairs and pairs.interval()[1] <= order.half_width)


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


def summarise(order: EfficiencyOrder, config: RunConfig, pairs: Pairs) -> Efficiency:
    mean, half = pairs.interval()
    speeds = [statistics.mean(column) for column in zip(*pairs.solo, strict=True)]
    bounds = Yardstick.of(speeds)
    rounds = [statistics.mean(column) for column in zip(*pairs.rounds, strict=True)]
    return Efficiency(
        model=order.model,
        policy=order.policy,
        against_ddp=order.against_ddp,
        devices=order.devices,
        batch_size=config.batch_size,
        precision=config.precision,
        compile=config.compile,
        backend=config.backend,
        efficiency=mean,
        half_width=half if math.isfinite(half) else None,
        pairs=len(pairs.ratios),
        gap=bounds.gap,
        ddp_bound=bounds.ddp_bound,
        split_bound=statistics.mean(pairs.bounds) if pairs.bounds else None,
        solo_samples_per_s=speeds,
        joint_samples_per_s=statistics.mean(pairs.joint),
        step_ms=statistics.mean(pairs.step_ms),
        busy_ms=[statistics.mean(column) for column in zip(*pairs.busy_ms, strict=True)],
        shares=pairs.shares[-1],
        payload_bytes_per_step=pairs.payload_bytes,
        merge_delay=Delays.of(pairs.delays),
        round_ms=RoundTimes(wait=rounds[0], transfer=rounds[1], latency=rounds[2]) if rounds else None,
        ratios=pairs.ratios,
        is_disturbed=len(pairs.disturbed) > MAX_DISTURBED * len(pairs.ratios),
        interference=DisturbedPairs(
            pairs.repeated, len(pairs.disturbed), pairs.disturbed[-1] if pairs.disturbed else None
        ),
    )


def sentences(result: Efficiency) -> list[str]:
    """The figure and its explanation, as lines to print; a disturbed figure is marked and not explained."""
    half = "" if result.half_width is None else f" +- {result.half_width:.3f}"
    figure = mark(f"{result.efficiency:.3f}{half}", result.is_disturbed)
    where = f"on {result.devices}, batch {result.batch_size}"
    line = f"{result.model} {result.policy} {where}: efficiency {figure} (95 %, {result.pairs} pairs)"
    if result.against_ddp:
        line = (
            f"{result.model} {result.policy} / torch DDP {where}: {figure} times as fast "
            f"(95 %, {result.pairs} pairs); {result.payload_bytes_per_step:,} bytes a step and rank"
        )
    if result.is_disturbed:
        num_disturbed = result.interference.disturbed_pairs
        return [line, f"{FOOTNOTE} ({num_disturbed} of {result.pairs} pairs, each measured twice)"]
    return [line] if result.against_ddp else [line, *_explanations(result)]


def _explanations(result: Efficiency) -> list[str]:
    """Speeds, gap and bounds, and how the rest of a step is spent."""
    gain = result.joint_samples_per_s / max(result.solo_samples_per_s) - 1.0
    lines = [
        f"  solo {' + '.join(f'{speed:,.0f}' for speed in result.solo_samples_per_s)} samples/s, together "
        f"{result.joint_samples_per_s:,.0f} ({gain:+.0%} to the fastest alone); gap {result.gap:.2f}, "
        f"equal-batch DDP at most {result.ddp_bound:.2f}",
    ]
    shares = ":".join(map(str, result.shares))
    delay, cost = result.merge_delay, result.round_ms
    if delay is not None and cost is not None:
        return [
            *lines,
            f"  windows of {shares} batches; merged {delay.mean:.2f} steps of the slowest rank after the snapshot "
            f"on average (99 %: {delay.p99:.2f}, most {delay.max:.2f}; {delay.rounds} merges)",
            f"  a round on the first device: {cost.wait:.1f} ms of waiting, {cost.transfer:.1f} ms of its own "
            f"time, {cost.latency:.1f} ms from snapshot to average",
        ]
    if result.split_bound is None:
        return [*lines, f"  split {shares}; a step takes {result.step_ms:.1f} ms"]
    busy = " and ".join(f"{ms:.1f}" for ms in result.busy_ms)
    return [
        *lines,
        f"  split {shares} could reach {result.split_bound:.3f} without communication; a step takes "
        f"{result.step_ms:.1f} ms, of which the ranks compute {busy} ms",
    ]


class PairsReporter(Reporter):
    """Progress of a measurement, from what rank 0 reports: a line for every tenth pair."""

    _shown_pairs = 0

    def ranks(self, statuses: Sequence[dict[str, Any]], first: int = 0) -> None:
        last = (statuses[first].get("history") or [{"pairs": 0}])[-1]
        if last["pairs"] // 10 > self._shown_pairs // 10:
            mean, half = last["interval"]
            self.say([f"{last['pairs']} pairs: efficiency {mean:.3f} +- {half:.3f}"])
        self._shown_pairs = last["pairs"]
