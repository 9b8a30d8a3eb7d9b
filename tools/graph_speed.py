"""Measure the speedup of compile="graph" on ResNet-20 and compare its losses with those of eager runs.

Usage: python tools/graph_speed.py [PAIRS] [EPOCHS]     (needs a CUDA device and `uneven data get cifar10`)

Each pair is one seed, trained eagerly and then captured, in the same process. Prints the paired ratio of images/s with
its 95 % interval, and per epoch the mean difference of the training losses beside the standard deviation over seeds.
"""

import statistics
import sys

from uneven import fit
from uneven.bench import models
from uneven.bench.models.sets import load_set

T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


def interval(values: list[float]) -> tuple[float, float]:
    return statistics.mean(values), T95[len(values)] * statistics.stdev(values) / len(values) ** 0.5


def main(pairs: int, epochs: int) -> None:
    recipe = models.get("resnet-20")
    train = load_set(recipe.data).train
    speeds: dict[str, list[float]] = {"off": [], "graph": []}
    losses: dict[str, list[list[float]]] = {"off": [], "graph": []}
    for seed in range(pairs):
        for mode in speeds:
            state = fit(
                model=recipe.make_model,
                optimizer=recipe.make_optimizer,
                step=recipe.train_step,
                dataset=train,
                batch_size=recipe.batch_size,
                epochs=epochs,
                devices="cuda:0",
                compile=mode,
                seed=seed,
                progress="off",
            )
            assert state.timeline is not None
            speeds[mode].append(state.samples / state.timeline.accounts[0].training_s)
            losses[mode].append([entry["train_loss"] for entry in state.history])
            print(f"seed {seed} {mode:5} {speeds[mode][-1]:9,.0f} images/s", flush=True)
    mean, half = interval([g / o for g, o in zip(speeds["graph"], speeds["off"], strict=True)])
    print(f"graph / eager: {mean:.2f} +- {half:.2f} ({pairs} pairs of {epochs} epochs)")
    print("epoch  eager loss (sd over seeds)  graph - eager (95 %)")
    for epoch in range(epochs):
        eager = [run[epoch] for run in losses["off"]]
        gap, half = interval([g[epoch] - o[epoch] for g, o in zip(losses["graph"], losses["off"], strict=True)])
        seeds = f"{statistics.mean(eager):.4f} ({statistics.stdev(eager):.4f})"
        print(f"{epoch + 1:5}  {seeds}  {gap:+.4f} +- {half:.4f}")


if __name__ == "__main__":
    arguments = [int(text) for text in sys.argv[1:3]]
    main(*(arguments + [6, 5][len(arguments) :]))
