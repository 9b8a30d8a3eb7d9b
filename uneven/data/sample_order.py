"""The order of an epoch's samples, a random key for each, and the check that each was trained exactly once.

Used by the feeds and, after a run, by results/state.py. Order and keys depend on (seed, epoch) alone, so they are the
same on every device and for any number of ranks. Imports no torch.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from uneven.policy.axis import Axis

_MASK = (1 << 64) - 1


def permutation(seed: int, epoch: int, samples: int) -> NDArray[np.int64]:
    """The sample index at each position of an epoch."""
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, epoch))))
    return generator.permutation(samples).astype(np.int64, copy=False)


def sample_keys(seed: int, epoch: int, samples: int) -> NDArray[np.int64]:
    """One well-mixed 64-bit key per position of the epoch, the seed of the sample's random augmentation.

    A key depends on (seed, epoch, position) only, so a sample is augmented the same on whichever rank trains it.
    """
    start = _mix(_mix(seed & _MASK) ^ (epoch & _MASK))
    counters = np.arange(samples, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    return _mix_array(counters).view(np.int64)


def _mix(value: int) -> int:
    return int(_mix_array(np.array([value], dtype=np.uint64))[0])


def _mix_array(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # The finalizer of splitmix64: every input bit affects every output bit.
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = value ^ (value >> np.uint64(31))
    return mixed


def prove_exactly_once(
    axis: Axis,
    logs: Sequence[Sequence[tuple[int, int, int]]],
    slots: int | None = None,
    skipped: Sequence[tuple[int, int]] = (),
) -> int:
    """Check from the ranks' logs that every sample of the first `slots` slots was trained exactly once.

    A log holds (slot, first, samples) of each part that a rank trained, or dropped. With `slots=None` only slots that
    were trained at all are checked: ranks that claim slots may stop at different ones. `skipped` holds (epoch, samples)
    where the user left out the rest of an epoch: there slots may be missing as a whole, of so many samples together.
    Returns the number of slots checked; RuntimeError names the first slot that is wrong.
    """
    left_out = dict.fromkeys((epoch for epoch, _ in skipped), 0)
    expected = range(slots) if slots is not None else sorted({index for log in logs for index, _, _ in log})
    parts: dict[int, list[tuple[int, int, int]]] = {index: [] for index in expected if 0 <= index < axis.total}
    for rank, log in enumerate(logs):
        for index, first, samples in log:
            if index not in parts:
                raise RuntimeError(f"rank {rank} trained slot {index}, which is outside the run")
            if samples:
                parts[index].append((first, first + samples, rank))
    for index, spans in parts.items():
        slot = axis.slot(index)
        if not spans and slot.epoch in left_out:
            left_out[slot.epoch] += slot.samples
            continue
        position = slot.first
        for first, stop, rank in sorted(spans):
            if first != position:
                fault = "left out" if first > position else "trained twice"
                low, high = min(position, first), max(position, first)
                raise RuntimeError(f"slot {index}: positions {low} to {high} were {fault} (rank {rank})")
            position = stop
        if position != slot.stop:
            raise RuntimeError(f"slot {index}: positions {position} to {slot.stop} were left out")
    for epoch, samples in skipped:
        if slots is not None and left_out[epoch] != samples:
            raise RuntimeError(f"epoch {epoch + 1}: {left_out[epoch]} samples were left out, not {samples} as agreed")
    return len(parts)


def check_dropped(logs: Sequence[Sequence[tuple[int, int, int]]], dropped: Sequence[tuple[int, int, int, int]]) -> None:
    """RuntimeError unless every (slot, rank, first, samples) dropped is a part of that rank's log, once."""
    parts = [set(log) for log in logs]
    for slot, rank, first, samples in dropped:
        if rank >= len(parts) or (slot, first, samples) not in parts[rank]:
            raise RuntimeError(f"slot {slot}: rank {rank} dropped {samples} samples from {first} on that it never had")
        parts[rank].remove((slot, first, samples))
