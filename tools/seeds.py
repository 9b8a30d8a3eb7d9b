"""Measure quality over seeds: LeNet on MNIST in every mode, the demo, ResNet-20 and gpt-nano on two slices of a GPU.

    python tools/seeds.py [OUT [WORD [SIDE_BY_SIDE]]]

Runs the jobs whose name contains WORD; without it, all that need no GPU. Runs with a summary on disk are not repeated,
so the script can be interrupted and resumed. Prints a table. SIDE_BY_SIDE runs at a time share the machine: then their
quality is valid and their seconds are not.
"""

import json
import multiprocessing
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from uneven.bench.orders import Order
from uneven.bench.single.run import run_single

PAIR = "cpu,cpu@0.4"
SLICES = "cuda:0%60,cuda:0%24"
Job = tuple[str, Order, Sequence[int]]  # name, run, seeds


def cpu_jobs() -> Iterator[Job]:
    lenet = Order(model="lenet", data="mnist", batch_size=64, epochs=5, eval_every=5)
    seeds = range(5)
    yield "lenet solo, batch 64", replace(lenet, devices="cpu"), seeds
    yield "lenet solo, batch 128", replace(lenet, devices="cpu", batch_size=128), seeds
    yield "lenet sync", replace(lenet, mode="cpu-sync", devices="cpu,cpu"), seeds
    for policy in ("balanced", "cadence", "async"):
        yield f"lenet {policy}", replace(lenet, mode=f"cpu-{policy}", devices=PAIR), seeds
    demo = replace(lenet, data="mnist-mini", epochs=3, eval_every=3)
    yield "demo solo", replace(demo, devices="cpu"), seeds
    yield "demo torch-ddp", replace(demo, mode="torch-ddp", devices=PAIR), seeds
    yield "demo async", replace(demo, mode="cpu-async", devices=PAIR), seeds


def gpu_jobs() -> Iterator[Job]:
    """Solo is the larger slice alone; each rank of a local policy steps on the same batch size.

    Rows that name no lr_scale use `auto`, which is linear.
    """
    resnet = Order(model="resnet-20", devices=SLICES, compile="graph", eval_every=50)
    for epochs, seeds in ((200, (0,)), (50, (0, 1, 2))):
        for mode in ("solo-0", "cpu-cadence", "cpu-async"):
            yield f"gpu resnet-20, {epochs} epochs, {mode}", replace(resnet, mode=mode, epochs=epochs), seeds
    for scale in (1.0, "sqrt"):
        named = replace(resnet, mode="cpu-async", epochs=50, lr_scale=scale)
        yield f"gpu resnet-20, 50 epochs, cpu-async, lr_scale {scale}", named, (0, 1, 2)
    gpt = Order(model="gpt-nano", devices=SLICES, compile="graph", epochs=20, eval_every=20)
    whole = replace(gpt, mode="solo-0", batch_size=2 * 64)
    yield "gpu gpt-nano, solo, batch 128", whole, (0, 1, 2)
    for mode in ("solo-0", "cpu-sync", "cpu-balanced", "cpu-cadence", "cpu-async"):
        yield f"gpu gpt-nano, {mode}", replace(gpt, mode=mode), (0, 1, 2)
    for scale in (1.0, "sqrt", 1.5):
        yield f"gpu gpt-nano, cpu-async, lr_scale {scale}", replace(gpt, mode="cpu-async", lr_scale=scale), (0, 1, 2)


def measure(out: Path, name: str, order: Order, seed: int) -> tuple[float, float]:
    """Run the job unless its summary exists; returns the quality and the seconds of training."""
    folder = out / name.replace(" ", "-").replace(",", "")
    order = replace(order, seed=seed, out=folder, progress="off")
    path = order.folder / "summary.json"
    if not path.exists():
        run_single(order)
    summary = json.loads(path.read_text())
    quality: float = summary["quality"][summary["metric"]]
    return (100 * quality if summary["metric"] == "accuracy" else quality), summary["train_seconds"]


def main(out: Path, word: str, side_by_side: int) -> None:
    print("| job | quality (accuracy in %, or loss), seed by seed | mean | standard deviation | s |")
    print("|---|---|---|---|---|")
    jobs = [job for job in [*cpu_jobs(), *gpu_jobs()] if word in job[0] and (word or not job[0].startswith("gpu"))]
    with ProcessPoolExecutor(side_by_side, multiprocessing.get_context("spawn")) as pool:
        runs = [[pool.submit(measure, out, name, order, seed) for seed in seeds] for name, order, seeds in jobs]
        for (name, _, _), started in zip(jobs, runs, strict=True):
            qualities, seconds = zip(*(run.result() for run in started), strict=True)
            deviation = f"{statistics.stdev(qualities):.3f}" if len(qualities) > 1 else "-"
            each_seed = ", ".join(f"{quality:.3f}" for quality in qualities)
            train_seconds = f"{statistics.mean(seconds):.1f}" if side_by_side == 1 else "-"
            print(
                f"| {name} | {each_seed} | {statistics.mean(qualities):.3f} | {deviation} | {train_seconds} |",
                flush=True,
            )


if __name__ == "__main__":
    given = dict(enumerate(sys.argv))
    main(Path(given.get(1, "runs/seeds")), given.get(2, ""), int(given.get(3, "1")))
