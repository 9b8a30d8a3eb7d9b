"""How many slots of a window each rank trains, so that all finish together; Windows asks with its estimates. Pure."""

from collections.abc import Sequence


def best_counts(window_ms: float, speeds: Sequence[float], slot_ms: Sequence[float]) -> tuple[int, ...]:
    """Whole counts for a window of about this length: at least 1, but 0 for a rank of speed 0, which is left out.

    Few ranks lose least when counts are rounded to nearest, many when all are rounded down.
    """
    exact = [window_ms * speed for speed in speeds]
    candidates = [tuple(max(1, int(count + up)) if count else 0 for count in exact) for up in (0.5, 0.25, 1e-9)]
    return max(candidates, key=lambda counts: efficiency(counts, speeds, slot_ms))


def efficiency(counts: Sequence[int], speeds: Sequence[float], slot_ms: Sequence[float]) -> float:
    """Predicted speed of such windows relative to the sum of all speeds; the rest is waiting."""
    window_ms = max(count * ms for count, ms in zip(counts, slot_ms, strict=True))
    return sum(counts) / (window_ms * sum(speeds))
