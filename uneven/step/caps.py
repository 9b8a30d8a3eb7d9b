"""Memory caps: how many samples a device can hold at once, found by trying larger and larger batches.

Memory grows by so many bytes a sample, so two sizes tell about all others: a batch that cannot fit is not tried, and
where it nevertheless does not, the way back is by halves. Every cap is a size that has been run.
"""

import math
from collections.abc import Callable

import torch

SHARE = 0.9  # of the memory that may be used: the rest is for what differs from batch to batch


def room_bytes(device: torch.device, ranks: int) -> float:
    """What this process may take of a CUDA device's memory, which `ranks` of them have in equal parts."""
    free, total = torch.cuda.mem_get_info(device)
    return SHARE * min(free + torch.cuda.memory_reserved(device), total / ranks)


def probe_cap(run: Callable[[int], None], device: torch.device, limit_bytes: float, first: int, most: int) -> int:
    """`find_cap` on a CUDA device; `run` leaves nothing there."""

    def run_anew(samples: int) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        run(samples)

    cap = find_cap(run_anew, lambda: torch.cuda.max_memory_allocated(device), limit_bytes, first, most)
    torch.cuda.empty_cache()  # another rank may want it
    torch.cuda.reset_peak_memory_stats(device)  # the run's own peak begins here
    return cap


def find_cap(
    run: Callable[[int], None], used_bytes: Callable[[], int], limit_bytes: float, first: int, most: int
) -> int:
    """The most samples, up to `most`, that `run` can take within the limit; doubling from `first`.

    `used_bytes()` is the peak of the last run. A next size that is less than an eighth larger is not worth a run.
    At least 1: a device that cannot hold a single sample fails by itself.
    """
    fits, too_many = 0, most + 1
    seen: list[tuple[int, int]] = []
    size = min(first, most)
    while size > fits and (size - fits > fits // 8 or size == most):
        used = _peak(run, used_bytes, size)
        if used is not None:
            seen.append((size, used))
        if used is not None and used <= limit_bytes:
            fits = size
        else:
            too_many = size
        larger = 2 * fits if too_many > most else (fits + too_many) // 2
        size = min(larger, too_many - 1, _predicted(seen, limit_bytes, most))
    return max(1, fits)


def _peak(run: Callable[[int], None], used_bytes: Callable[[], int], samples: int) -> int | None:
    """What so many samples take; None where there is not as much."""
    try:
        run(samples)
    except RuntimeError as error:  # cuBLAS and cuDNN have words of their own for it
        if not isinstance(error, torch.OutOfMemoryError) and "ALLOC_FAILED" not in str(error):
            raise
        return None
    return used_bytes()


def _predicted(seen: list[tuple[int, int]], limit_bytes: float, most: int) -> int:
    """How many samples fit by the line through the two largest sizes that ran."""
    if len(seen) < 2:
        return most
    (small, few), (large, many) = sorted(seen)[-2:]
    if many <= few:
        return most
    return min(most, large + math.floor((limit_bytes - many) * (large - small) / (many - few)))
