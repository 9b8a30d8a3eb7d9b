"""What a step costs: on this rank fixed + per sample, measured at two sizes before the group forms; and the sum."""

import statistics
import time
from collections.abc import Callable

import torch

from uneven.comm.group import Group
from uneven.policy.finish import Cost

REPEATS = 3


def measure_cost(run_step: Callable[[int], None], samples: int) -> Cost:
    """`run_step(n)` trains n samples; timed at the expected share and at half of it, after one untimed step.

    The larger of noise and truth is not known here, so the fixed part is kept between 0 and the whole.
    """
    half = max(1, samples // 2)
    run_step(samples)
    whole_ms = _typical_ms(run_step, samples)
    if half == samples:
        return Cost(0.0, whole_ms / samples)
    run_step(half)
    half_ms = _typical_ms(run_step, half)
    sample_ms = max((whole_ms - half_ms) / (samples - half), 0.05 * whole_ms / samples)
    sample_ms = min(sample_ms, whole_ms / samples)
    return Cost(max(0.0, whole_ms - sample_ms * samples), sample_ms)


def _typical_ms(run_step: Callable[[int], None], samples: int) -> float:
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        run_step(samples)
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def measure_sum_ms(group: Group, numbers: int) -> float:
    """What one sum of so many gradients takes when nobody has to be waited for; the same value on all ranks."""
    gradients = torch.zeros(numbers)
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        group.sum_(gradients).wait()
        times.append((time.perf_counter() - began) * 1e3)
    return float(group.max_(torch.tensor([min(times)], dtype=torch.float64)).wait())
