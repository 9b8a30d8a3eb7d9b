"""global_batch_size="auto": the samples of a step, chosen once when the group has formed and all costs are known.

Called by the worker on all ranks, before the first shares are set. All of them compute the same from the same numbers.
The choice replaces "auto" in the run's settings, and so it is in its state, log and checkpoints: a run that is resumed
or replayed keeps it (launch/checks/resume.py, launch/checks/preflight.py).
"""

from collections.abc import Sequence
from dataclasses import replace

from uneven.policy.finish import Cost
from uneven.policy.global_batch import SUM_SHARE, choose_factor, step_ms
from uneven.step.measure import measure_sum_ms
from uneven.train.engine import Engine

DEFAULT_FACTOR = 4  # times the samples of a plain step, where max_global_batch_size was not given


def settle_global_batch(engine: Engine, costs: Sequence[Cost]) -> list[str]:
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
