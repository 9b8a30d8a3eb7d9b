"""What an exact policy is made of: its shares, advice by measured costs, the global batch, steps captured ahead.

The policy is as a log has it, as the user gave it, even, or by speed. GradientSync calls all of it but
`choose_global_batch`, which the worker calls on all ranks before the first shares are set: all compute the same from
the same numbers, and the number replaces "auto" in the run's settings. So it is in its state, log and checkpoints, and
a run that is resumed or replayed keeps it (launch/checks/resume.py, launch/checks/preflight.py).

Captured steps are captured before training needs them, on all ranks at the same time: once the first shares are known,
and at the end of every epoch. In the middle of training a capture makes all other ranks wait. So the sizes around the
split are captured, too, and shares do not move farther than that within an epoch (`Balanced.reach`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from uneven.config import SHARDED
from uneven.data.replay import read_log
from uneven.parallel.batchnorm import has_batchnorm
from uneven.policy.axis import Part
from uneven.policy.calibrating import Calibrating
from uneven.policy.exact import Balanced, ExactPolicy, Fixed
from uneven.policy.finish import Cost
from uneven.policy.global_batch import SUM_SHARE, choose_factor, step_ms
from uneven.policy.subset import advice, forecast
from uneven.step.captured import GRID
from uneven.step.measure import measure_sum_ms
from uneven.step.no_trace import no_trace
from uneven.train.engine import Engine


def make_exact_policy(engine: Engine, costs: Sequence[Cost], is_model_parallel: bool) -> ExactPolicy:
    """`costs`: every rank's; the result must depend on nothing that ranks do not know alike."""
    config = engine.config
    if config.replay is not None:
        info = engine.rank_info
        log = read_log(
            config.replay, engine.axis, info.world_size, config.to_json(), False, machines=info.roster.machines
        )
        return log.shares(engine.axis.total)
    if config.shares is not None:
        return Fixed(config.shares)
    if config.policy == "sync" or is_model_parallel:
        return Fixed.even(engine.rank_info.world_size)
    least = 2 if has_batchnorm(engine.model) and not engine.batchnorm_sync.layers else 1
    samples, lookahead = engine.axis.slot(0).samples, engine.feed.lookahead
    caps = tuple(int(min(cap * config.accumulate, samples)) for cap in engine.caps)
    if not engine.can_warm_up:
        first = engine.state.trained + 1  # the slot before it compiles and allocates
        return Calibrating(engine.rank_info.world_size, samples, first, least, lookahead, caps)
    # In a slot smaller than this a grid would leave ranks without samples. The same on all ranks.
    is_on_grid = config.compile == "graph" and samples >= GRID * engine.rank_info.world_size
    grid, reach = (GRID, REACH) if is_on_grid else (1, None)
    # Captured steps tell the policy of their times one step later (`GradientSync._follow_speeds`).
    lookahead += config.compile == "graph"
    return Balanced(tuple(costs), samples, caps, least, lookahead, grid, reach=reach)


def advise(engine: Engine, costs: Sequence[Cost]) -> list[str]:
    """A line where fewer devices would be faster; a collective, so all ranks call it after the same slot."""
    if engine.config.strategy in SHARDED:
        return []  # devices that hold shards are needed for their memory, whatever their speed
    info = engine.rank_info
    found = forecast(costs, engine.axis.slot(0).samples, measure_sum_ms(info.group, engine.model))
    return advice(found, [str(device) for device in info.devices])


DEFAULT_FACTOR = 4  # times the samples of a plain step, where max_global_batch_size was not given


def choose_global_batch(engine: Engine, costs: Sequence[Cost]) -> list[str]:
    """Replace "auto" by a number in the engine's settings; a collective. Returns the line that tells it, if any."""
    config, info = engine.config, engine.rank_info
    if config.global_batch_size != "auto":
        return []
    base = config.slot_size(info.world_size)
    limit = config.max_global_batch_size or DEFAULT_FACTOR * base
    factor, lines = 1, []
    if info.world_size > 1:
        compute_ms, sum_ms = step_ms(costs, base, engine.least), measure_sum_ms(info.group, engine.model)
        factor = choose_factor(compute_ms, sum_ms, min(limit, engine.axis.samples) // base)
        part = sum_ms / (factor * compute_ms + sum_ms)
        why = f"a gradient sum takes ~{sum_ms:.1f} ms, the compute of {base} samples ~{compute_ms:.1f} ms"
        many = f"{base}" if factor == 1 else f"{factor} x {base}"
        at_limit = "" if part <= SUM_SHARE + 1e-6 else f"; max_global_batch_size={limit} allows no more"
        lines = [f"  global batch {factor * base} ({many}): {why}; sums are ~{part:.0%} of a step{at_limit}"]
        engine.recorder.event("global batch", samples=factor * base, sum_ms=sum_ms, compute_ms=compute_ms)
    accumulate, samples = config.accumulate * factor, base * factor
    engine.settle_axis(replace(config, global_batch_size=samples, accumulate=accumulate, max_global_batch_size=None))
    return lines


AHEAD = 3  # grid steps to either side of the present share
REACH = (AHEAD - 1) * GRID  # samples: rounding to the grid may take a share one step farther

Shares = Callable[[int, int], Sequence[int]]  # (slot, its samples) -> every rank's


def capture_ahead(engine: Engine, shares: Shares, is_moving: bool) -> None:
    """`is_moving`: the policy may move the shares. Each rank for itself."""
    step = engine.step
    if not step.is_captured or engine.rank_info.world_size == 1:
        return
    rank, axis = engine.rank_info.rank, engine.axis
    full, last = axis.slot(0), axis.slot(axis.slots_per_epoch - 1)
    own = shares(engine.state.trained, full.samples)[rank]
    sizes = {full.samples: around(own, full.samples) if is_moving else [own]}
    sizes.setdefault(last.samples, [shares(engine.state.trained, last.samples)[rank]])
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
