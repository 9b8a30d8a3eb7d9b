"""Capture the steps that training will need before it needs them, on all ranks at the same time.

GradientSync calls it once the group has formed and the first shares are known, and at the end of every epoch. In the
middle of training a capture makes all other ranks wait: so the sizes around the split are captured, too, and shares do
not move farther than that within an epoch (`Balanced.reach`).
"""

from collections.abc import Callable, Sequence

from uneven.policy.axis import Part
from uneven.step.captured import GRID
from uneven.step.no_trace import no_trace
from uneven.train.engine import Engine

AHEAD = 3  # grid steps to either side of the present share
REACH = (AHEAD - 1) * GRID  # samples: rounding to the grid may take a share one step farther

Shares = Callable[[int, int], Sequence[int]]  # (slot, its samples) -> every rank's


def capture_ahead(engine: Engine, shares: Shares, is_moving: bool) -> None:
    """`is_moving`: the policy may move the shares. Each rank for itself."""
    step = engine.eager
    if not step.is_captured or engine.rank_info.world_size == 1:
        return
    rank, axis = engine.rank_info.rank, engine.axis
    full, last = axis.slot(0), axis.slot(axis.slots_per_epoch - 1)
    own = shares(engine.trained, full.samples)[rank]
    sizes = {full.samples: around(own, full.samples) if is_moving else [own]}
    sizes.setdefault(last.samples, [shares(engine.trained, last.samples)[rank]])
    parts = [(_part(engine, samples), slot_samples) for slot_samples, wanted in sizes.items() for samples in wanted]
    missing = [(part, slot_samples) for part, slot_samples in parts if not step.is_prepared(part.sizes, slot_samples)]
    if not missing:
        return
    state = engine.recorder.state
    engine.recorder.enter("compile")
    with no_trace(step, engine.device, keep_optimizer_tensors=True):
        streamed = engine.feed.stream([part for part, _ in missing])
        for (_, micros), (_, slot_samples) in zip(streamed, missing, strict=True):
            step.prepare(micros, slot_samples)
    engine.run_ahead.drain()
    engine.recorder.enter(state)


def _part(engine: Engine, samples: int) -> Part:
    return Part(engine.axis.slot(0), 0, samples, engine.micro_batch_size(samples))


def around(share: int, most: int) -> list[int]:
    """The share and those a few grid steps smaller and larger; the nearest ones last, so that they are kept longest."""
    steps = [sign * step * GRID for step in range(AHEAD, 0, -1) for sign in (1, -1)]
    return [*(share + step for step in steps if 0 < share + step <= most), share]
