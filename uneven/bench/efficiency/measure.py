"""`uneven bench efficiency`: joint samples/s over the sum of the devices' solo samples/s, as a paired ratio.

The yardstick of the project. Beside the figure stand its interval, the measured gap, what equal-batch DDP could reach
at most, what the split in use could reach without communication (its bound), and where the rest of a step goes.
"""

import json
import statistics
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from uneven.bench import models
from uneven.bench.efficiency.segments import Pairs, SegmentPlan, alternate
from uneven.bench.models.sets import load_set
from uneven.bench.undisturbed import FOOTNOTE, is_disturbed, mark
from uneven.config import RunConfig, Task, resolve
from uneven.errors import InputError
from uneven.hardware.device import parse_devices
from uneven.hardware.yardstick import ddp_bound, gap
from uneven.launch.launcher import run_ranks
from uneven.launch.preflight import settle
from uneven.results.progress import Reporter

POLICIES = ("sync", "balanced", "cadence", "async", "torch-ddp")
FOREVER = 10**6  # epochs: the segments end by themselves
MAX_DISTURBED = 0.1  # of the pairs: both segments of a pair are disturbed alike, so a few move the mean but little


@dataclass(frozen=True, kw_only=True)
class EfficiencyOrder:
    """What to measure."""

    model: str
    policy: str = "balanced"
    devices: str = "cpu,cpu@0.4"
    data: str | None = None
    batch_size: int | None = None
    precision: str = "fp32"
    compile: str = "off"
    backend: str = "auto"
    seconds: float = 1.5
    least_pairs: int = 30
    most_pairs: int = 200
    half_width: float = 0.03
    against_ddp: bool = False  # the ratio is then ours / PyTorch's DDP, side by side in the same processes


def measure_efficiency(order: EfficiencyOrder, reporter: Reporter) -> dict[str, Any]:
    """Run the pairs and sum them up."""
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
    recipe = models.get(order.model)
    data = load_set(order.data or recipe.data)
    make_model = recipe.make_model if data.vocabulary is None else partial(recipe.make_model, data.vocabulary)
    task = Task(make_model, recipe.make_optimizer, recipe.train_step, data.train, None, None)
    config = resolve(
        {
            "batch_size": recipe.batch_size if order.batch_size is None else order.batch_size,
            "epochs": FOREVER,
            "policy": "sync" if order.policy == "torch-ddp" else order.policy,
            "precision": order.precision,
            "compile": "off" if order.policy == "torch-ddp" else order.compile,
            "backend": order.backend,
        }
    )
    config, _ = settle(config, devices)
    if config.slot_size(len(devices)) > len(data.train):
        raise InputError(f"batch size {config.batch_size} on {len(devices)} devices is more than the set has")
    plan = SegmentPlan(
        joint="torch-ddp" if order.policy == "torch-ddp" else "policy",
        reference="torch-ddp" if order.against_ddp else "solo",
        seconds=order.seconds,
        least_pairs=order.least_pairs,
        most_pairs=order.most_pairs,
        half_width=order.half_width,
    )
    pairs = run_ranks((task, config, partial(alternate, plan)), devices, threading.Event(), reporter, _read)
    return summarise(order, config, pairs)


def _read(folder: Path) -> Pairs:
    return Pairs(**json.loads((folder / "result-0" / "pairs.json").read_text()))


def summarise(order: EfficiencyOrder, config: RunConfig, pairs: Pairs) -> dict[str, Any]:
    mean, half = pairs.interval()
    speeds = [statistics.mean(column) for column in zip(*pairs.solo, strict=True)]
    return {
        "version": 1,
        "model": order.model,
        "policy": order.policy,
        "against_ddp": order.against_ddp,
        "devices": order.devices,
        "batch_size": config.batch_size,
        "precision": config.precision,
        "compile": config.compile,
        "backend": config.backend,
        "efficiency": mean,
        "half_width": half,
        "pairs": len(pairs.ratios),
        "gap": gap(speeds),
        "ddp_bound": ddp_bound(speeds),
        "split_bound": statistics.mean(pairs.bounds) if pairs.bounds else None,
        "solo_samples_per_s": speeds,
        "joint_samples_per_s": statistics.mean(pairs.joint),
        "step_ms": statistics.mean(pairs.step_ms),
        "busy_ms": [statistics.mean(column) for column in zip(*pairs.busy_ms, strict=True)],
        "shares": pairs.shares[-1],
        "payload_bytes_per_step": pairs.payload_bytes,
        "merge_delay": _delays(pairs.delays),
        "round_ms": _round_ms(pairs.rounds),
        "ratios": pairs.ratios,
        "is_disturbed": len(pairs.disturbed) > MAX_DISTURBED * len(pairs.ratios),
        "interference": {
            "repeated_pairs": pairs.repeated,
            "disturbed_pairs": len(pairs.disturbed),
            "last": pairs.disturbed[-1] if pairs.disturbed else None,
        },
    }


def _delays(delays: list[float]) -> dict[str, float] | None:
    """From a rank's snapshot to its merge, in steps of the slowest rank."""
    if not delays:
        return None
    ordered = sorted(delays)
    return {
        "rounds": len(ordered),
        "mean": statistics.mean(ordered),
        "p99": ordered[int(0.99 * (len(ordered) - 1))],
        "max": ordered[-1],
    }


def _round_ms(rounds: list[tuple[float, float, float]]) -> dict[str, float] | None:
    """What a round takes on rank 0, on average: waiting, the rank's own time for it, and from snapshot to average."""
    if not rounds:
        return None
    names = ("wait", "transfer", "latency")
    return {name: statistics.mean(column) for name, column in zip(names, zip(*rounds, strict=True), strict=True)}


def sentences(result: dict[str, Any]) -> list[str]:
    """The figure and what it means; a disturbed figure is marked, and nothing is derived from it."""
    is_marked = is_disturbed(result)
    figure = mark(f"{result['efficiency']:.3f} +- {result['half_width']:.3f}", is_marked)
    if is_marked:
        many = result["interference"]["disturbed_pairs"]
        footnote = [f"{FOOTNOTE} ({many} of {result['pairs']} pairs, each measured twice)"]
    else:
        footnote = []
    where = f"on {result['devices']}, batch {result['batch_size']}"
    if result["against_ddp"]:
        line = (
            f"{result['model']} {result['policy']} / torch DDP {where}: {figure} times as fast "
            f"(95 %, {result['pairs']} pairs); {result['payload_bytes_per_step']:,} bytes a step and rank"
        )
        return [line, *footnote]
    line = f"{result['model']} {result['policy']} {where}: efficiency {figure} (95 %, {result['pairs']} pairs)"
    return [line, *(footnote or _explanations(result))]


def _explanations(result: dict[str, Any]) -> list[str]:
    """Speeds, gap and bounds, and where the rest of a step goes."""
    over = result["joint_samples_per_s"] / max(result["solo_samples_per_s"]) - 1.0
    lines = [
        f"  solo {' + '.join(f'{speed:,.0f}' for speed in result['solo_samples_per_s'])} samples/s, together "
        f"{result['joint_samples_per_s']:,.0f} ({over:+.0%} to the fastest alone); gap {result['gap']:.2f}, "
        f"equal-batch DDP at most {result['ddp_bound']:.2f}",
    ]
    shares = ":".join(str(share) for share in result["shares"])
    if result["merge_delay"] is not None:
        late = result["merge_delay"]
        lines.append(
            f"  windows of {shares} batches; merged {late['mean']:.2f} steps of the slowest rank after the snapshot on "
            f"average (99 %: {late['p99']:.2f}, most {late['max']:.2f}; {late['rounds']} merges)"
        )
        cost = result["round_ms"]
        lines.append(
            f"  a round on the first device: {cost['wait']:.1f} ms of waiting, {cost['transfer']:.1f} ms of its own "
            f"time, {cost['latency']:.1f} ms from snapshot to average"
        )
    elif result["split_bound"] is not None:
        busy = " and ".join(f"{ms:.1f}" for ms in result["busy_ms"])
        lines.append(
            f"  split {shares} could reach {result['split_bound']:.3f} without communication; a step takes "
            f"{result['step_ms']:.1f} ms, of which the ranks compute {busy} ms"
        )
    else:
        lines.append(f"  split {shares}; a step takes {result['step_ms']:.1f} ms")
    return lines
