"""What a device holds and how fast it is: its memory cap, and its time for a step and for a sum of gradients.

Memory grows linearly with the samples, so a line through two sizes predicts the others: a batch that cannot fit is not
tried, and one that does not fit after all is halved. Every cap is a size that has been run.
"""

import math
import time
from collections.abc import Callable

import torch
from torch import nn

from uneven.comm.group import Group
from uneven.policy.finish import Cost, fitted

USABLE = 0.9  # of the memory: the rest is for differences between batches
REPEATS = 3


def room_bytes(device: torch.device, ranks: int) -> float:
    """The bytes of a CUDA device's memory that this rank may use, if `ranks` of them share the device equally."""
    free, total = torch.cuda.mem_get_info(device)
    return USABLE * min(free + torch.cuda.memory_reserved(device), total / ranks)


def probe_cap(run: Callable[[int], None], device: torch.device, limit_bytes: float, first: int, most: int) -> int:
    """`find_cap` on a CUDA device; `run` must free what it allocates."""

    def run_with_empty_cache(samples: int) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        run(samples)

    cap = find_cap(run_with_empty_cache, lambda: torch.cuda.max_memory_allocated(device), limit_bytes, first, most)
    torch.cuda.empty_cache()  # for other ranks on the device
    torch.cuda.reset_peak_memory_stats(device)  # so that the peak reported later is that of training
    return cap


def find_cap(
    run: Callable[[int], None], used_bytes: Callable[[], int], limit_bytes: float, first: int, most: int
) -> int:
    """The most samples, up to `most`, that `run` can take within the limit; starts with `first` and doubles.

    `used_bytes()` is the peak of the last run. A size less than an eighth larger is not worth another run. The result
    is at least 1: a device that cannot hold a single sample fails with its own error.
    """
    fits, too_many = 0, most + 1
    seen: list[tuple[int, int]] = []
    size = min(first, most)
    while size > fits and (size - fits > fits // 8 or size == most):
        used = _peak_bytes(run, used_bytes, size)
        if used is not None:
            seen.append((size, used))
        if used is not None and used <= limit_bytes:
            fits = size
        else:
            too_many = size
        larger = 2 * fits if too_many > most else (fits + too_many) // 2
        size = min(larger, too_many - 1, _predicted_cap(seen, limit_bytes, most))
    return max(1, fits)


def _peak_bytes(run: Callable[[int], None], used_bytes: Callable[[], int], samples: int) -> int | None:
    """The peak of a run with so many samples; None if it is out of memory."""
    try:
        run(samples)
    except RuntimeError as error:  # cuBLAS and cuDNN report it in their own way
        if not isinstance(error, torch.OutOfMemoryError) and "ALLOC_FAILED" not in str(error):
            raise
        return None
    return used_bytes()


def _predicted_cap(seen: list[tuple[int, int]], limit_bytes: float, most: int) -> int:
    """How many samples fit by the line through the two largest sizes that ran."""
    if len(seen) < 2:
        return most
    (smaller, smaller_bytes), (larger, larger_bytes) = sorted(seen)[-2:]
    if larger_bytes <= smaller_bytes:
        return most
    room = math.floor((limit_bytes - larger_bytes) * (larger - smaller) / (larger_bytes - smaller_bytes))
    return min(most, larger + room)


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
