"""Mean and 95 % confidence interval by Student's t; with few seeds the normal distribution would be too narrow."""

import math
import statistics
from collections.abc import Sequence

# 97.5 % quantiles for 1 to 30 degrees of freedom.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's t; above 30 degrees of freedom, an approximation that is right to 0.003."""
    return _T[degrees - 1] if degrees <= len(_T) else 1.96 + 2.4 / degrees


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and the half-width of its 95 % interval: (value, inf) for a single value, (nan, inf) for none."""
    if not values:
        return math.nan, math.inf
    if len(values) == 1:
        return values[0], math.inf
    return statistics.mean(values), quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
