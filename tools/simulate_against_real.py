"""The simulation against real runs: `python tools/simulate_against_real.py`, on a quiet machine, some twenty minutes.

For each pair of devices, two things are measured by `uneven bench efficiency`: what the simulation is told, and the
efficiency of every policy at the batch size, with which the simulated one is compared. It is told how a step's time
divides into a fixed part and one per sample (from the speeds alone at half and at twice the batch size), the time of a
gradient sum, ours and that of PyTorch's DDP, and a round's own time (at half the batch size), and the speeds alone
beside which the efficiency was measured: on a shared machine they drift by half within minutes, and so does the gap
between two devices. Nothing of the joint steps that are predicted goes into the simulation. `--save` keeps what was
measured, `--read` simulates it again.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from uneven.bench.efficiency import PairsReporter, measure_efficiency
from uneven.bench.orders import EfficiencyOrder
from uneven.files import finite
from uneven.simulate.cluster import Cluster, Job, Policy, RankKind
from uneven.simulate.links import Link
from uneven.simulate.simulation import simulate

REAL: dict[Policy, str] = {
    "equal": "torch-ddp",
    "sync": "sync",
    "balanced": "balanced",
    "cadence": "cadence",
    "async": "async",
}
ALLOWED = 0.03


def measure(args: argparse.Namespace, devices: str, policy: str, batch_size: int, pairs: int) -> dict[str, Any]:
    order = EfficiencyOrder(
        model=args.model,
        data=args.data,
        devices=devices,
        policy=policy,
        batch_size=batch_size,
        seconds=args.seconds,
        least_pairs=pairs,
        most_pairs=max(pairs, args.most_pairs),
    )
    print(f"{devices}: {policy} at {batch_size} ...", file=sys.stderr)
    reporter = PairsReporter("off")
    try:
        found: dict[str, Any] = finite(measure_efficiency(order, reporter))
        return found
    finally:
        reporter.close()


def measure_pair(args: argparse.Namespace, devices: str) -> dict[str, Any]:
    half, twice, few = args.batch_size // 2, 2 * args.batch_size, max(3, args.pairs // 3)
    return {
        "devices": devices,
        "batch_size": args.batch_size,
        "half": measure(args, devices, "sync", half, few),
        "twice": measure(args, devices, "sync", twice, few),
        "rounds": measure(args, devices, "async", half, few),
        "half_ddp": measure(args, devices, REAL["equal"], half, few) if "equal" in args.policies else None,
        "measured": {
            policy: measure(args, devices, name, args.batch_size, args.pairs)
            for policy, name in REAL.items()
            if policy in args.policies
        },
    }


def cluster_of(found: dict[str, Any], policy: str, alone: list[float], jitter: float) -> Cluster:
    """What the simulation is told for this policy; `alone` are the devices' speeds at the batch size."""
    half, twice, size = found["half"], found["twice"], found["batch_size"]
    kinds = []
    round_ms = (found["rounds"]["round_ms"] or {"transfer": 0.0})["transfer"]
    for name, slow, fast, speed in zip(
        found["devices"].split(","), half["solo_samples_per_s"], twice["solo_samples_per_s"], alone, strict=True
    ):
        small_ms, large_ms = 1e3 * (size // 2) / slow, 1e3 * 2 * size / fast
        sample_ms = max(0.05 * large_ms / (2 * size), (large_ms - small_ms) / (2 * size - size // 2))
        fixed_ms = max(0.0, small_ms - sample_ms * (size // 2))
        drift = 1e3 * size / speed / (fixed_ms + sample_ms * size)
        kinds.append(RankKind(name, drift * fixed_ms, drift * sample_ms, jitter, round_ms=round_ms))
    sum_ms = max(0.0, half["step_ms"] - max(half["busy_ms"]))
    if policy == "equal" and (ddp := found.get("half_ddp")) is not None:  # it sums while backward runs: no busy_ms
        sum_ms = max(0.0, ddp["step_ms"] - 1e3 * (size // 2) / min(ddp["solo_samples_per_s"]))
    return Cluster(tuple(kinds), (0,) * len(kinds), Link(1e9, sum_ms / 2.0))  # a sum has two messages


def compare(found: dict[str, Any], jitter: float) -> list[tuple[str, str, float, float, float]]:
    rows = []
    for policy, real in found["measured"].items():
        cluster = cluster_of(found, policy, real["solo_samples_per_s"], jitter)
        speed = sum(kind.speed(found["batch_size"]) for kind in cluster.ranks)
        job = Job(samples_per_epoch=int(speed * 60), batch_size=found["batch_size"], epochs=3)
        simulated = simulate(cluster, job, policy).efficiency
        rows.append((found["devices"], policy, real["efficiency"], real["half_width"], simulated))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", default=["cpu,cpu@0.4", "cpu,cpu"])
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--data", default="mnist-mini")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--policies", nargs="+", default=list(REAL), choices=list(REAL))
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--most-pairs", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--jitter", type=float, default=0.03)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--read", type=Path)
    args = parser.parse_args()
    found = json.loads(args.read.read_text()) if args.read else [measure_pair(args, one) for one in args.devices]
    if args.save:
        args.save.write_text(json.dumps(found, indent=1))
    rows = [row for pair in found for row in compare(pair, args.jitter)]
    print(f"{'devices':14}{'policy':10}{'measured':>18}{'simulated':>11}{'difference':>12}")
    for devices, policy, real, half, simulated in rows:
        is_far = abs(simulated - real) > ALLOWED + half
        print(
            f"{devices:14}{policy:10}{real:10.3f} +- {half:.3f}{simulated:11.3f}{simulated - real:+12.3f}"
            f"{'  *' if is_far else ''}"
        )
    print(f"\n*: beyond {ALLOWED} and the interval. Median of the differences: ", end="")
    print(f"{statistics.median(abs(simulated - real) for *_, real, _, simulated in rows):.3f}")


if __name__ == "__main__":
    main()
