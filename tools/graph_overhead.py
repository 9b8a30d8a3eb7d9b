"""What a forward through a graph costs over the same forward through a module: ResNet-20, batch 32, one thread.

    python tools/graph_overhead.py [--pairs N] [--no-compile]     (needs nothing else to run on the machine)

One process times the two in turn, one forward each, and who goes first changes from pair to pair; a row is the mean
ratio of the pairs' times with its 95 % interval. "eval" is without gradients, "train" records them. Compiled means
torch.compile in its default mode, both compiled beforehand and without a break in the graph. The last column is the
same module against a copy of itself: what the machine alone makes of equal things.
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


def compare(one: Forward, other: Forward, images: torch.Tensor, is_training: bool, pairs: int) -> list[float]:
    """The pairs' ratios of the first's time over the second's."""
    ratios = []
    for number in range(pairs):
        first, second = (one, other) if number % 2 == 0 else (other, one)
        times = [seconds(forward, images, is_training) for forward in (first, second)]
        ratios.append(times[0] / times[1] if number % 2 == 0 else times[1] / times[0])
    return ratios


def words(ratios: list[float]) -> str:
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
    plain, graph, twin = forwards
    found = words(compare(graph, plain, images, is_training, pairs))
    noise = words(compare(twin, plain, images, is_training, pairs))
    name = f"{'train' if is_training else 'eval'}{', compiled' if is_compiled else ''}"
    return f"{name:<18}{1e3 * min(times[0]):>10.1f}{found:>22}{noise:>22}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pairs", type=int, default=100, help="of each row, 40 or more")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out, which takes minutes")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {given.pairs} pairs, load {os.getloadavg()[0]:.2f}")
    print(f"{'mode':<18}{'module ms':>10}{'graph / module':>22}{'copy / module':>22}")
    for is_compiled in (False,) if given.no_compile else (False, True):
        for is_training in (False, True):
            print(measure(is_compiled, is_training, given.pairs), flush=True)


if __name__ == "__main__":
    main()
