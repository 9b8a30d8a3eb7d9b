"""Communication of a strategy's steps: hidden behind compute, or exposed because the rank waits for it.

Called by rank.py after the timed steps, which are not observed.
"""

import torch
from torch import Tensor

from uneven.bench.strategies.task import Batches, Trained, step
from uneven.comm.observed import BackwardTail, observe_collectives

STEPS = 2
WAITS_IN_BACKWARD = ("torch-ddp", "torch-zero1")  # DistributedDataParallel waits in C++, after the last gradient
UNSEEN = ("torch-tensor",)  # its collectives start in C++


def measure_overlap(
    row: str, trained: Trained, batches: Batches, first: int, device: torch.device, losses: list[Tensor]
) -> dict[str, float] | None:
    """Seconds a step; None where collectives cannot be seen. Trains STEPS steps from batch `first` on."""
    with observe_collectives() as observed:
        for number in range(first, first + STEPS):
            tail = BackwardTail(observed) if row in WAITS_IN_BACKWARD else None
            losses.append(step(trained, batches, number, tail))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    if row in UNSEEN:
        return None
    found: dict[str, float] = {
        "in_flight_s": observed.in_flight_s / STEPS,
        "hidden_s": observed.hidden_s / STEPS,
        "exposed_s": observed.exposed_s / STEPS,
    }
    return found
