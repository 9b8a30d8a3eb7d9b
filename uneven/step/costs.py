"""Measures the cost of a step: a rank's fixed and per-sample time, before the group forms, and the gradient sum."""

import time
from collections.abc import Callable

import torch
from torch import nn

from uneven.comm.group import Group
from uneven.policy.finish import Cost, fitted

REPEATS = 3


def measure_cost(run_step: Callable[[int], None], samples: int, least: int = 1, untimed: int = 1) -> Cost:
    """Time `run_step(n)`, which trains n samples and waits for the device, at the expected share and at half of it.

    `least`: the smallest step (BatchNorm cannot train on one sample). The first `untimed` steps of a size are warm-up.
    """
    half = max(min(least, samples), samples // 2)
    return fitted([timing for size in {samples, half} for timing in _timed(run_step, size, untimed)])


def _timed(run_step: Callable[[int], None], samples: int, untimed: int) -> list[tuple[int, float]]:
    for _ in range(untimed):
        run_step(samples)
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        run_step(samples)
        times.append((samples, (time.perf_counter() - began) * 1e3))
    return times


def measure_sum_ms(group: Group, model: nn.Module) -> float:
    """The time of one all-reduce of the model's gradients when all ranks start together; the same on all ranks."""
    trained = [param for param in model.parameters() if param.requires_grad]
    device = trained[0].device if trained else torch.device("cpu")
    gradients = torch.zeros(sum(param.numel() for param in trained), device=device)
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        group.all_reduce(gradients).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # NCCL's wait blocks the stream, not the host
        times.append((time.perf_counter() - began) * 1e3)
    return float(group.all_reduce_max(torch.tensor([min(times)], dtype=torch.float64)).wait())
