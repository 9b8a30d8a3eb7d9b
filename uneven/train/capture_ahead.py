"""Capture the steps that training will need before it needs them, on all ranks at the same time.

GradientSync calls it once the group has formed and the first shares are known, and at the end of every epoch. In the
middle of training a capture makes all other ranks wait: so the sizes around the split are captured, too, and shares do
not move farther than that within an epoch (`Balanced.reach`).
"""

from collections.abc import Callable, Sequence

from uneven.comm.gather import gather_rows
from uneven.comm.group import Group
from uneven.data.feed import Micros
from uneven.errors import InputError
from uneven.policy.axis import Part
from uneven.step.captured import GRID, CapturedBackward
from uneven.step.no_trace import no_trace
from uneven.step.whole import Key, WholeStep
from uneven.train.engine import Engine

AHEAD = 3  # grid steps to either side of the present share
REACH = (AHEAD - 1) * GRID  # samples: rounding to the grid may take a share one step farther

Shares = Callable[[int, int], Sequence[int]]  # (slot, its samples) -> every rank's


def use_whole_steps(engine: Engine, group: Group) -> None:
    """Where NCCL sums the gradients, let `capture_ahead` capture the sum, too; when the reducer is there.

    A collective there: machines may have different versions of torch.
    """
    captured = engine.captured
    if captured is None or not captured.is_summed_by_nccl:
        return
    if all(device.speed >= 1 for device in engine.rank_info.devices):  # others sleep between their work and the sum
        captured.make_whole()
    if not all(able for (able,) in gather_rows(group, [float(captured.whole is not None)])):
        captured.leave_whole()


def capture_ahead(engine: Engine, group: Group, shares: Shares, is_moving: bool) -> list[str]:
    """`is_moving`: the policy may move the shares. Returns lines to print; a collective where NCCL sums gradients."""
    captured, lines = engine.captured, []
    if captured is None:
        return []
    state = engine.recorder.state
    engine.recorder.enter("compile")
    if captured.whole is not None:
        lines = _capture_whole(engine, group, captured.whole, shares, is_moving)
    if lines:
        captured.leave_whole()
    if captured.whole is None:
        _capture_halves(engine, captured, shares, is_moving)
    engine.recorder.enter(state)
    return lines


def _capture_halves(engine: Engine, captured: CapturedBackward, shares: Shares, is_moving: bool) -> None:
    """Each rank for itself."""
    rank, axis = engine.rank_info.rank, engine.axis
    full, last = axis.slot(0), axis.slot(axis.slots_per_epoch - 1)
    own = shares(engine.trained, full.samples)[rank]
    sizes = {full.samples: around(own, full.samples) if is_moving else [own]}
    sizes.setdefault(last.samples, [shares(engine.trained, last.samples)[rank]])
    parts = [(_part(engine, samples), slot_samples) for slot_samples, wanted in sizes.items() for samples in wanted]
    missing = [(part, slot_samples) for part, slot_samples in parts if not captured.has(part.sizes, slot_samples)]
    _run_without_trace(engine, missing, lambda _, *step: captured.capture_ahead(*step))


def _capture_whole(engine: Engine, group: Group, whole: WholeStep, shares: Shares, is_moving: bool) -> list[str]:
    """All ranks together, [Note: captured together]; returns lines to print where it failed on any rank."""
    axis, rank = engine.axis, engine.rank_info.rank
    full, last = axis.slot(0), axis.slot(axis.slots_per_epoch - 1)
    split = tuple(shares(engine.trained, full.samples))
    keys: list[Key] = [(near, full.samples) for near in (around_split(split) if is_moving else [split])]
    keys.append((tuple(shares(engine.trained, last.samples)), last.samples))
    missing = [key for key in dict.fromkeys(keys) if not whole.has(key)]
    parts = [(_part(engine, samples[rank]), slot_samples) for samples, slot_samples in missing]
    lines: list[str] = []

    def capture(place: int, micros: Micros, slot_samples: int) -> None:
        reason = ""
        try:
            if not lines:
                whole.capture(missing[place], micros, slot_samples)
        except InputError as error:
            reason = f": {error}"
        if any(failed for (failed,) in gather_rows(group, [float(bool(reason))])):
            lines.append(f"  compile='graph': NCCL's sum could not be captured, it runs between two graphs{reason}")

    _run_without_trace(engine, parts, capture)
    return lines


def _run_without_trace(
    engine: Engine, parts: Sequence[tuple[Part, int]], run: Callable[[int, Micros, int], None]
) -> None:
    """run(place, inputs, samples of the slot) for each of the parts."""
    if not parts:
        return
    with no_trace(engine.eager, engine.device, keep_optimizer_tensors=True):
        streamed = engine.feed.stream([part for part, _ in parts])
        for place, ((_, micros), (_, slot_samples)) in enumerate(zip(streamed, parts, strict=True)):
            run(place, micros, slot_samples)
    engine.run_ahead.drain()


def _part(engine: Engine, samples: int) -> Part:
    return Part(engine.axis.slot(0), 0, samples, engine.micro_batch_size(samples))


def around(share: int, most: int) -> list[int]:
    """The share and those a few grid steps smaller and larger; the nearest ones last, so that they are kept longest."""
    steps = [sign * step * GRID for step in range(AHEAD, 0, -1) for sign in (1, -1)]
    return [*(share + step for step in steps if 0 < share + step <= most), share]


def around_split(shares: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The same for the shares of all ranks. Three ranks or more can move in too many ways: the present split alone."""
    if len(shares) != 2 or 0 in shares:
        return [shares]
    total = sum(shares)
    return [(first, total - first) for first in around(shares[0], total - 1)]
