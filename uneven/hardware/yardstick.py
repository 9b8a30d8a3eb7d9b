"""Upper bounds that follow from the devices' speeds, as pure arithmetic. Printed by `uneven devices --measure`.

All devices together reach at most the sum of their speeds. With equal batches every device waits for the slowest, so n
devices reach at most n * slowest.
"""

from collections.abc import Sequence

from uneven.errors import InputError


def _check(speeds: Sequence[float]) -> None:
    if not speeds or not all(0.0 < speed < float("inf") for speed in speeds):
        raise InputError(f"speeds {list(speeds)!r}: allowed are one or more samples/s above 0")


def gap(speeds: Sequence[float]) -> float:
    """Fastest over slowest."""
    _check(speeds)
    return max(speeds) / min(speeds)


def ddp_bound(speeds: Sequence[float]) -> float:
    """The largest fraction of the summed speeds that equal-batch DDP can reach: n * min / sum."""
    _check(speeds)
    return len(speeds) * min(speeds) / sum(speeds)


def joint_over_fast(speeds: Sequence[float]) -> float:
    """The largest possible speedup over the fastest device alone: sum / max."""
    _check(speeds)
    return sum(speeds) / max(speeds)


def ddp_over_fast(speeds: Sequence[float]) -> float:
    """The largest speedup of equal-batch DDP over the fastest device alone; below 1 it is slower than that device."""
    _check(speeds)
    return len(speeds) * min(speeds) / max(speeds)
