"""What a step costs: on this rank fixed + per sample, measured at two sizes before the group forms; and the sum."""

import time
from collections.abc import Callable

import torch
from torch import nn

from uneven.comm.group import Group
from uneven.policy.finish import Cost, fitted

REPEATS = 3


def measure_cost(run_step: Callable[[int], None], samples: int, least: int = 1, untimed: int = 1) -> Cost:
    """`run_step(n)` trains n samples and returns when it is done; timed at the expected share and at half of it.

    `least` is what a step needs: BatchNorm cannot train on one sample. The first `untimed` steps of a size warm it up.
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
    """What one sum of the model's gradients takes when nobody has to be waited for; the same value on all ranks."""
    trained = [param for param in model.parameters() if param.requires_grad]
    device = trained[0].device if trained else torch.device("cpu")
    gradients = torch.zeros(sum(param.numel() for param in trained), device=device)
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        group.all_reduce(gradients).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # NCCL's wait is the stream's, not the host's
        times.append((time.perf_counter() - began) * 1e3)
    return float(group.all_reduce_max(torch.tensor([min(times)], dtype=torch.float64)).wait())
