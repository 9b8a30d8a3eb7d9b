"""The factor on the learning rate in the local policies: averaging params over ranks damps every rank's step.

The factor follows the effective number of ranks, 1 / sum(share^2): 2 for two equal ranks, 1 if one rank trains all.
"""

from collections.abc import Sequence

WARM_UP_SHARE = 0.1  # of the run, and one epoch at most
CHANGE = 0.1  # smaller changes of the factor are not applied


def effective_ranks(speeds: Sequence[float]) -> float:
    return sum(speeds) ** 2 / sum(speed * speed for speed in speeds)


def lr_scale(rule: str | float, speeds: Sequence[float]) -> float:
    """The factor on every learning rate. "auto" is linear: measured better than the root, for Adam as for SGD."""
    if not isinstance(rule, str):
        return float(rule)
    ranks = effective_ranks(speeds)
    return float(ranks**0.5) if rule == "sqrt" else ranks


def ramp(scale: float, samples: int, epoch: int, total: int) -> float:
    """The factor after so many global samples: it grows linearly from 1 during the warm-up."""
    length = min(float(epoch), WARM_UP_SHARE * total)
    if samples >= length:
        return scale
    return 1.0 + (scale - 1.0) * samples / length
