"""Settling where params or optimizer state are sharded: those who are left put them together, and divide them anew.

Called by settle.py and settler.py, on all who are left.

[Note: whole state in hand] The whole state (`engine.whole_state`) is on the host of every rank from the moment it was
put together until the first update in the new group begins: then all ranks have divided it. So where yet another rank
is lost, either all of those who are left have it, or none of them has begun to divide it, or all of them have.

Where a shard is lost for good they go back to a checkpoint (train/elastic/roll_back.py), whose state is then the one in
hand. One that was lost in the middle of that may leave some who have gone back and some who have not: then all go back.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from uneven.comm.gather import gather_rows
from uneven.comm.group import Group
from uneven.parallel.strategy import FullState, on_host
from uneven.parallel.survivors import CanSurvive
from uneven.step.strategy_step import StrategyStep
from uneven.train.engine import Engine


def updates_of(engine: Engine) -> int:
    """How many updates this rank has applied to its shards since they were divided; 0 where nothing is sharded."""
    return engine.strategy.updates if isinstance(engine.strategy, CanSurvive) else 0


def settle_shards(engine: Engine, group: Group, before: Sequence[str], members: Sequence[str]) -> bool:
    """Put the whole state together, of the furthest step; a collective. False on all where a shard is lost.

    `before` are the members whose ranks hold the shards, `members` those who are left, each in rank order.
    """
    strategy = engine.strategy
    assert isinstance(strategy, CanSurvive), "see why_not in settle.py"
    rows = gather_rows(group, [float(engine.whole_state is not None), float(engine.rolled_back)])
    rolled_back = {which for _, which in rows if which}
    if not all(has for has, _ in rows):  # [Note: whole state in hand]
        survived = None
        if not rolled_back:
            survived = strategy.surviving_state(group, [list(before).index(member) for member in members])
        if survived is None:
            return False
        engine.whole_state = survived.state
    elif len(rolled_back) > 1:
        return False
    keep_whole(engine, engine.whole_state)
    return True


def keep_whole(engine: Engine, state: FullState | None) -> None:
    """This is the whole state: for the run's result, where nothing is left to train; else until it is divided."""
    assert state is not None
    engine.whole_state, engine.full_state = state, lambda: state


def keep_at_end(engine: Engine) -> None:
    """Nothing is left to train: gather what the run returns while everybody is here; a collective.

    A rank that is lost from now on is not missed, though nobody has a copy of its shards.
    """
    if isinstance(engine.strategy, CanSurvive) and engine.full_state is not None:
        keep_whole(engine, engine.full_state())


def leave_shards(engine: Engine) -> None:
    """Before a strategy is made for those who are left: the model is whole again, with plain optimizer and step."""
    state, strategy = engine.whole_state, engine.strategy
    if state is None or not isinstance(strategy, CanSurvive):
        return
    strategy.leave(state)
    engine.leave_strategy(engine.step.plain if isinstance(engine.step, StrategyStep) else engine.step)
    if engine.rank_info.world_size == 1:
        engine.optimizer.load_state_dict(on_host(state.optimizer))  # PyTorch takes tensors that fit without a copy
        engine.strategy = engine.whole_state = None
        engine.rolled_back = 0


def load_whole_state(engine: Engine, schedule: Mapping[str, Any]) -> None:
    """When the strategy of a new group is made: divide the state, if there is one, by the memory of who is left."""
    state = engine.whole_state
    if state is None:
        return
    assert engine.load_full_state is not None, "a strategy that shards can load"
    engine.load_full_state(state)
    engine.schedule.load_state_dict(schedule)
    engine.rolled_back = 0  # all have gone back, or this group would not train

    def forget(*_: object) -> None:
        engine.whole_state = None

    engine.optimizer.register_step_pre_hook(forget)
