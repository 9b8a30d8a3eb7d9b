"""Capture the steps that training will need before its first one, on all ranks at the same time.

GradientSync calls it once the group has formed and the first shares are known. In the middle of training a capture
makes all other ranks wait, and shares move by a grid step now and then: so the sizes around the split are captured,
too. A share that moves farther is captured when it comes a second time (step/captured.py).
"""

from collections.abc import Callable, Sequence

from uneven.policy.axis import Part
from uneven.step.captured import GRID
from uneven.step.warmup import no_trace
from uneven.train.engine import Engine

AHEAD = 3  # grid steps to either side of the first share


def capture_ahead(engine: Engine, shares: Callable[[int, int], Sequence[int]], is_moving: bool) -> None:
    """`shares(slot, samples)` are the first ones of all ranks; `is_moving`: the policy may move them."""
    captured, rank, first = engine.captured, engine.rank_info.rank, engine.axis.slot(0)
    if captured is None:
        return
    engine.recorder.enter("compile")
    last = engine.axis.slot(engine.axis.slots_per_epoch - 1)
    own = shares(first.index, first.samples)[rank]
    sizes = {first.samples: around(own, first.samples) if is_moving else [own]}
    sizes.setdefault(last.samples, [shares(last.index, last.samples)[rank]])
    with no_trace(engine.eager, engine.device, keep_optimizer_tensors=True):
        for slot_samples, wanted in sizes.items():
            parts = [Part(first, 0, samples, engine.micro_batch_size(samples)) for samples in wanted if samples]
            for _, micros in engine.feed.stream(parts):
                captured.capture_ahead(micros, slot_samples)
    engine.run_ahead.drain()


def around(share: int, most: int) -> list[int]:
    """The share and those a few grid steps smaller and larger; the nearest ones last, so that they are kept longest."""
    steps = [sign * step * GRID for step in range(AHEAD, 0, -1) for sign in (1, -1)]
    return [*(share + step for step in steps if 0 < share + step <= most), share]
