"""What a step costs: on this rank fixed + per sample, measured at two sizes before the group forms; and the sum."""

import time
from collections.abc import Callable

import torch
from torch import nn

from uneven.comm.group import Group
from uneven.policy.finish import Cost, fitted

REPEATS = 3


def measure_cost(run_step: Callable[[int], None], samples: int, least: int = 1) -> Cost:
    """`run_step(n)` trains n samples; timed at the expected share and at half of it, each after one untimed step.

    `least` is what a step needs: BatchNorm cannot train on one sample.
    """
    half = max(min(least, samples), samples // 2)
    return fitted([timing for size in {samples, half} for timing in _timed(run_step, size)])


def _timed(run_step: Callable[[int], None], samples: int) -> list[tuple[int, float]]:
    run_step(samples)
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        run_step(samples)
        times.append((samples, (time.perf_counter() - began) * 1e3))
    return times


def measure_sum_ms(group: Group, model: nn.Module) -> float:
    """What one sum of the model's gradients takes when nobody has to be waited for; the same value on all ranks."""
    gradients = torch.zeros(sum(param.numel() for param in model.parameters() if param.requires_grad))
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        group.sum_(gradients).wait()
        times.append((time.perf_counter() - began) * 1e3)
    return float(group.max_(torch.tensor([min(times)], dtype=torch.float64)).wait())
