"""Quality over seeds: LeNet on full MNIST in every mode, and the demo's job in async and torch-ddp.

    python tools/seeds.py [OUT [WORD]]

With a word only the jobs whose name has it. Runs that are finished (their summary is there) are not repeated, so it can
be interrupted. Prints a table.
"""

import json
import statistics
import sys
from pathlib import Path

from uneven.bench.single import Order, run_single

SEEDS = range(5)
PAIR = "cpu,cpu@0.4"
JOBS = [
    # (name, mode, devices, data, batch size, epochs)
    ("solo, batch 64", "solo-0", "cpu", "mnist", 64, 5),
    ("solo, batch 128", "solo-0", "cpu", "mnist", 128, 5),
    ("sync", "cpu-sync", "cpu,cpu", "mnist", 64, 5),
    ("balanced", "cpu-balanced", PAIR, "mnist", 64, 5),
    ("cadence", "cpu-cadence", PAIR, "mnist", 64, 5),
    ("async", "cpu-async", PAIR, "mnist", 64, 5),
    ("demo: solo", "solo-0", "cpu", "mnist-mini", 64, 3),
    ("demo: torch-ddp", "torch-ddp", PAIR, "mnist-mini", 64, 3),
    ("demo: async", "cpu-async", PAIR, "mnist-mini", 64, 3),
]


def measure(out: Path, name: str, mode: str, devices: str, data: str, batch_size: int, epochs: int, seed: int) -> float:
    home = out / name.replace(" ", "-").replace(":", "").replace(",", "")
    summary = home / "lenet" / mode / f"seed-{seed}" / "summary.json"
    if not summary.exists():
        run_single(
            Order(
                model="lenet",
                mode=mode,
                devices=devices,
                data=data,
                batch_size=batch_size,
                epochs=epochs,
                eval_every=epochs,
                seed=seed,
                out=home,
                progress="off",
            )
        )
    accuracy: float = json.loads(summary.read_text())["quality"]["accuracy"]
    return 100 * accuracy


def main(out: Path, word: str) -> None:
    print("| job | accuracy, %, seeds 0 to 4 | mean | standard deviation |\n|---|---|---|---|")
    for name, *job in (one for one in JOBS if word in one[0]):
        found = [measure(out, name, *job, seed) for seed in SEEDS]
        each = ", ".join(f"{one:.2f}" for one in found)
        print(f"| {name} | {each} | {statistics.mean(found):.2f} | {statistics.stdev(found):.2f} |", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/seeds"), sys.argv[2] if len(sys.argv) > 2 else "")
