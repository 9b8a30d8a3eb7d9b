"""The ledger: who trains which samples, exactly once. An epoch is a permutation drawn from (seed, epoch) alone.

Imports no torch. The same seed gives the same order on every device, for any number of ranks.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from uneven.policy.axis import Axis

_MASK = (1 << 64) - 1


def permutation(seed: int, epoch: int, samples: int) -> NDArray[np.int64]:
    """The order in which an epoch's samples stand on the axis."""
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, epoch))))
    return generator.permutation(samples).astype(np.int64, copy=False)


def sample_keys(seed: int, epoch: int, samples: int) -> NDArray[np.int64]:
    """One well-mixed 64-bit key per position of the epoch; everything random about a sample derives from it.

    Keyed by (seed, epoch, position), so a sample is augmented the same whichever rank trains it.
    """
    start = _mix(_mix(seed & _MASK) ^ (epoch & _MASK))
    counters = np.arange(samples, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    return _mix_array(counters).view(np.int64)


def _mix(value: int) -> int:
    return int(_mix_array(np.array([value], dtype=np.uint64))[0])


def _mix_array(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # The finaliser of splitmix64: every input bit reaches every output bit.
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = value ^ (value >> np.uint64(31))
    return mixed


def prove_exactly_once(axis: Axis, logs: Sequence[Sequence[tuple[int, int, int]]], slots: int | None = None) -> int:
    """Check from the ranks' logs that every sample of the first `slots` slots was trained exactly once.

    None: of those slots that were trained at all, since ranks that claim their slots stop each at its own. A log holds
    (slot, first, samples) of each part a rank trained. Returns the number of slots; RuntimeError names a wrong one.
    """
    due = range(slots) if slots is not None else sorted({index for log in logs for index, _, _ in log})
    parts: dict[int, list[tuple[int, int, int]]] = {index: [] for index in due if 0 <= index < axis.total}
    for rank, log in enumerate(logs):
        for index, first, samples in log:
            if index not in parts:
                raise RuntimeError(f"rank {rank} trained slot {index}, which was never due")
            if samples:
                parts[index].append((first, first + samples, rank))
    for index, found in parts.items():
        slot = axis.slot(index)
        place = slot.first
        for first, stop, rank in sorted(found):
            if first != place:
                what = "left out" if first > place else "trained twice"
                raise RuntimeError(
                    f"slot {index}: positions {min(place, first)} to {max(place, first)} were {what} (rank {rank})"
                )
            place = stop
        if place != slot.stop:
            raise RuntimeError(f"slot {index}: positions {place} to {slot.stop} were left out")
    return len(parts)
