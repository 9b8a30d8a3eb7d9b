"""Settling where params or optimizer state are sharded: those who are left put them together, and divide them anew.

Called by settle.py and settler.py, on all who are left. [Note: whole state in hand] `engine.whole_state` is on the host
of every rank from the moment it was put together until the first update in the new group begins: then all ranks have
divided it. So where yet another rank is lost, either all of those who are left have it, or none of them has begun to
divide it, or all of them have.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from uneven.comm.gather import gather_rows
from uneven.comm.group import Group
from uneven.errors import RankError
from uneven.parallel.strategy import on_host
from uneven.parallel.survivors import CanSurvive
from uneven.step.strategy_step import StrategyStep
from uneven.train.engine import Engine


def updates_of(engine: Engine) -> int:
    """How many updates this rank has applied to its shards since they were divided; 0 where nothing is sharded."""
    return engine.strategy.updates if isinstance(engine.strategy, CanSurvive) else 0


def settle_shards(engine: Engine, group: Group, before: Sequence[str], members: Sequence[str]) -> None:
    """Put the whole state together, of the furthest step; a collective. RankError on all where a shard is lost.

    `before` are the members whose ranks hold the shards, `members` those who are left, each in rank order.
    """
    strategy = engine.strategy
    assert isinstance(strategy, CanSurvive), "see why_not in settle.py"
    has_all = all(has for (has,) in gather_rows(group, [float(engine.whole_state is not None)]))
    if not has_all:  # [Note: whole state in hand]
        survived = strategy.surviving_state(group, [list(before).index(member) for member in members])
        if survived is None:
            gone = ", ".join(member for member in before if member not in members)
            raise RankError(
                f"{gone} had a shard of the model whose copy is lost as well: redundancy={engine.config.redundancy} "
                "keeps one; go on from the last checkpoint with resume='auto'"
            )
        engine.whole_state = survived.state
    state = engine.whole_state
    assert state is not None
    engine.full_state = lambda: state  # for the run's result, where nothing is left to train; else until it is divided


def leave_shards(engine: Engine) -> None:
    """Before a strategy is made for those who are left: the model is whole again, with plain optimizer and step."""
    state, strategy = engine.whole_state, engine.strategy
    if state is None or not isinstance(strategy, CanSurvive):
        return
    strategy.leave(state)
    engine.leave_strategy(engine.eager.plain if isinstance(engine.eager, StrategyStep) else engine.eager)
    if engine.rank_info.world_size == 1:
        engine.optimizer.load_state_dict(on_host(state.optimizer))  # PyTorch takes tensors that fit without a copy
        engine.strategy = engine.whole_state = None


def load_whole_state(engine: Engine, schedule: Mapping[str, Any]) -> None:
    """When the strategy of a new group is made: divide the state, if there is one, by the memory of who is left."""
    state = engine.whole_state
    if state is None:
        return
    assert engine.load_full_state is not None, "a strategy that shards can load"
    engine.load_full_state(state)
    engine.schedule.load_state_dict(schedule)

    def forget(*_: object) -> None:
        engine.whole_state = None

    engine.optimizer.register_step_pre_hook(forget)
