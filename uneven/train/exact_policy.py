"""The exact policy of a run: as a log has it, as the user gave it, evenly, or by speed; and advice by its costs.

GradientSync calls it.
"""

from collections.abc import Sequence

from uneven.config import SHARDED
from uneven.data.replay import read_log
from uneven.parallel.batchnorm import has_batchnorm
from uneven.policy.calibrating import Calibrating
from uneven.policy.exact import Balanced, ExactPolicy, Fixed
from uneven.policy.finish import Cost
from uneven.policy.subset import advice, forecast
from uneven.step.captured import GRID
from uneven.step.measure import measure_sum_ms
from uneven.train.capture_ahead import REACH
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
        first = engine.trained + 1  # the slot before it compiles and allocates
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
