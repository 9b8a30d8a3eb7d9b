"""Upper bounds that follow from the devices' speeds, as pure arithmetic. Printed by `uneven devices --measure`.

All devices together reach at most the sum of their speeds. With equal batches every device waits for the slowest, so n
devices reach at most n * slowest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from uneven.errors import InputError


@dataclass(frozen=True)
class Yardstick:
    """What these devices could reach."""

    gap: float  # fastest over slowest
    ddp_bound: float  # the largest fraction of the summed speeds that equal-batch DDP can reach
    ddp_over_fast: float  # the largest speed-up of equal-batch DDP over the fastest device alone; below 1 it is slower
    joint_over_fast: float  # the largest possible speed-up over the fastest device alone

    @classmethod
    def of(cls, speeds: Sequence[float]) -> "Yardstick":
        if not speeds or not all(0.0 < speed < float("inf") for speed in speeds):
            raise InputError(f"speeds {list(speeds)!r}: allowed are one or more samples/s above 0")
        slowest, fastest = min(speeds), max(speeds)
        ddp = len(speeds) * slowest
        return cls(
            gap=fastest / slowest,
            ddp_bound=ddp / sum(speeds),
            ddp_over_fast=ddp / fastest,
            joint_over_fast=sum(speeds) / fastest,
        )
