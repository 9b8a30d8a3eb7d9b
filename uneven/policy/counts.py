"""How many slots of a window each rank trains, so that all finish together; Windows asks with its estimates. Pure."""

import numpy as np

from uneven.policy.typical import Floats, Ints

ROUNDING = np.array([[0.5], [0.25], [1e-9]])


def best_counts(window_ms: float, speeds: Floats, slot_ms: Floats) -> Ints:
    """Whole counts for a window of about this length: at least 1, but 0 for a rank of speed 0, which is left out.

    Few ranks lose least when counts are rounded to nearest, many when all are rounded down.
    """
    exact = window_ms * speeds
    counts = np.maximum((exact + ROUNDING).astype(np.int64), 1) * (exact > 0.0)
    slots, window = counts.sum(axis=1), (counts * slot_ms).max(axis=1)  # whole numbers have one sum, in any order
    best: Ints = counts[(slots / window).argmax()]  # the first of those that wait least
    return best


def slots_per_ms(counts: Ints, slot_ms: Floats) -> float:
    """Predicted speed of such windows; what is missing to the sum of all speeds is waiting."""
    return int(counts.sum()) / float((counts * slot_ms).max())
