"""Who holds what, when the group has formed: the strategy takes its place in the rig of every rank.

Samples go by speed and bytes by memory, and the two have nothing to do with each other.
"""

from collections.abc import Sequence

from torch import nn

from uneven.comm.gather import gather_rows
from uneven.comm.group import Group
from uneven.config import SHARDED
from uneven.errors import InputError
from uneven.parallel.buckets import BUCKET_BYTES, UNLIMITED
from uneven.parallel.catalog import make_strategy
from uneven.parallel.gradients import GradientRoad
from uneven.parallel.sharded_optimizer import ShardedOptimizer
from uneven.parallel.strategy import FullState, on_host
from uneven.step.strategy_step import StrategyStep
from uneven.train.engine import Engine


def apply_strategy(engine: Engine, group: Group, columns: int) -> list[str]:
    """Lay the road that gradients are summed by, or give the model to a strategy; returns what is to be said of it.

    `columns` is the length of the row that each rank sends along with every sum.
    """
    name = engine.config.strategy
    shares = _shares(engine, group) if name in SHARDED else None
    if engine.config.is_replicated:
        # Layers that wait for each other in backward keep their order only if nothing is sent in between.
        overlaps = not engine.batchnorm_sync.layers and engine.captured is None and name != "ddp-flat"
        bucket_bytes = UNLIMITED if name == "ddp-flat" else BUCKET_BYTES
        engine.eager.road = GradientRoad(
            list(engine.model.parameters()), group, columns, bucket_bytes, overlaps=overlaps
        )
    if name == "zero1":
        _shard_optimizer(engine, group, shares)
    elif name is not None and not engine.config.is_replicated:
        if engine.config.is_model_parallel:
            _refuse_dropout(name, engine.model)
        strategy = make_strategy(name, engine.model, engine.task.make_optimizer, group, shares)
        step = StrategyStep(engine.eager, strategy, group, is_model_parallel=engine.config.is_model_parallel)
        engine.use_strategy(strategy.optimizer, strategy.full_state, step)
    if shares is None:
        return []
    return [f"  {name}: bytes {'by memory' if engine.config.memory_shares is None else 'as given'}, {_percent(shares)}"]


def _shard_optimizer(engine: Engine, group: Group, shares: Sequence[float] | None) -> None:
    model = engine.model
    optimizer = ShardedOptimizer(engine.task.make_optimizer(model.parameters()), group, shares=shares)
    engine.use_strategy(optimizer, lambda: FullState(on_host(dict(model.state_dict())), optimizer.state_dict()))


def _shares(engine: Engine, group: Group) -> Sequence[float]:
    """As given, or by the memory of the devices."""
    if engine.config.memory_shares is not None:
        return engine.config.memory_shares
    return [memory for (memory,) in gather_rows(group, [float(engine.memory_bytes)])]


def _refuse_dropout(name: str, model: nn.Module) -> None:
    """Each rank would drop other elements of what all of them hold, and their models would part."""
    kinds = (nn.modules.dropout._DropoutNd,)
    found = [where for where, module in model.named_modules() if isinstance(module, kinds) and module.p > 0]
    if found:
        raise InputError(
            f"strategy={name!r}: {found[0]} drops elements at random, and devices that compute the same samples would "
            "drop different ones; set its p to 0, or use strategy='fsdp'"
        )


def _percent(shares: Sequence[float]) -> str:
    return " : ".join(f"{100 * share / sum(shares):.0f}" for share in shares) + " %"
