"""Measure the overhead of a graph's forward over that of the hand-written module: ResNet-20, batch 32, one thread.

    python tools/graph_overhead.py [--pairs N] [--no-compile]     (on an otherwise idle machine)

One process times pairs of one forward each, and the order within a pair alternates. A row is the mean ratio of the
pairs' times with its 95 % interval. "eval" runs without gradients, "train" records them. "compiled" means torch.compile
in its default mode, without graph breaks, compiled before the measurement. The last column compares the module with a
copy of itself and shows the noise.
"""

import argparse
import copy
import os
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn

from uneven.bench.interval import interval
from uneven.bench.models.resnet20 import ResNet20
from uneven.bench.models.resnet_graph import make_graph

BATCH = 32
WARM_UP = 3
Forward = Callable[[torch.Tensor], torch.Tensor]


def seconds(forward: Forward, images: torch.Tensor, is_training: bool) -> float:
    with nullcontext() if is_training else torch.no_grad():
        began = time.perf_counter()
        forward(images)
        return time.perf_counter() - began


def compare(subject: Forward, reference: Forward, images: torch.Tensor, is_training: bool, pairs: int) -> list[float]:
    """The ratio of the subject's time to the reference's time in each pair."""
    ratios = []
    for number in range(pairs):
        first, second = (subject, reference) if number % 2 == 0 else (reference, subject)
        times = [seconds(forward, images, is_training) for forward in (first, second)]
        ratios.append(times[0] / times[1] if number % 2 == 0 else times[1] / times[0])
    return ratios


def format_mean(ratios: list[float]) -> str:
    mean, half = interval(ratios)
    return f"{mean:.4f} +- {half:.4f}"


def measure(is_compiled: bool, is_training: bool, pairs: int) -> str:
    torch.manual_seed(0)
    module = ResNet20()
    torch.manual_seed(0)
    models: list[nn.Module] = [module, make_graph(), copy.deepcopy(module)]
    images = torch.randn(BATCH, 3, 32, 32)
    forwards: list[Forward] = []
    for model in models:
        model.train(is_training)
        forwards.append(torch.compile(model, fullgraph=True) if is_compiled else model)
    times = [[seconds(forward, images, is_training) for _ in range(WARM_UP)] for forward in forwards]
    plain, graph, module_copy = forwards
    overhead = format_mean(compare(graph, plain, images, is_training, pairs))
    noise = format_mean(compare(module_copy, plain, images, is_training, pairs))
    name = f"{'train' if is_training else 'eval'}{', compiled' if is_compiled else ''}"
    return f"{name:<18}{1e3 * min(times[0]):>10.1f}{overhead:>22}{noise:>22}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pairs", type=int, default=100, help="number of pairs in each row, 40 or more")
    parser.add_argument(
        "--no-compile", action="store_true", help="skip the rows with torch.compile, which take minutes"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {arguments.pairs} pairs, load {os.getloadavg()[0]:.2f}")
    print(f"{'mode':<18}{'module ms':>10}{'graph / module':>22}{'copy / module':>22}")
    for is_compiled in (False,) if arguments.no_compile else (False, True):
        for is_training in (False, True):
            print(measure(is_compiled, is_training, arguments.pairs), flush=True)


if __name__ == "__main__":
    main()
