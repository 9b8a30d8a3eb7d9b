"""What a set of speeds allows at best: pure arithmetic, printed by `uneven devices --measure`.

The yardstick of the whole project: everything together is the sum of the speeds; equal batches make every
device wait for the slowest, so they reach n * slowest at most.
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
    """The most that equal-batch DDP can reach of the sum of speeds: n * min / sum."""
    _check(speeds)
    return len(speeds) * min(speeds) / sum(speeds)


def joint_over_fast(speeds: Sequence[float]) -> float:
    """What there is to win: the sum of speeds over the fast device alone."""
    _check(speeds)
    return sum(speeds) / max(speeds)


def ddp_over_fast(speeds: Sequence[float]) -> float:
    """What equal-batch DDP can reach at most, over the fast device alone; below 1 it loses."""
    _check(speeds)
    return len(speeds) * min(speeds) / max(speeds)
