"""How much larger a learning rate the local policies want: averaging params over ranks damps every rank's step.

The scale follows the effective number of ranks, 1 / sum(share^2): two equal ranks are 2, one that does everything is 1.
"""

from collections.abc import Sequence

WARM_UP_SHARE = 0.1  # of the run, and one epoch at most
CHANGE = 0.1  # a smaller change of the scale is not worth one


def effective_ranks(speeds: Sequence[float]) -> float:
    return sum(speeds) ** 2 / sum(speed * speed for speed in speeds)


def lr_scale(rule: str | float, speeds: Sequence[float]) -> float:
    """The factor on every learning rate. "auto" is linear: measured better than the root, for Adam as for SGD."""
    if not isinstance(rule, str):
        return float(rule)
    ranks = effective_ranks(speeds)
    return float(ranks**0.5) if rule == "sqrt" else ranks


def ramp(scale: float, samples: int, epoch: int, total: int) -> float:
    """The scale after so many global samples: it grows from 1 in the warm-up."""
    length = min(float(epoch), WARM_UP_SHARE * total)
    if samples >= length:
        return scale
    return 1.0 + (scale - 1.0) * samples / length
