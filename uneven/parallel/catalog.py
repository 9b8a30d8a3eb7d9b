"""The strategies by the names that users type."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from uneven.comm.group import Group
from uneven.config import STRATEGIES
from uneven.errors import InputError
from uneven.parallel.ddp_bucketed import DDPBucketed
from uneven.parallel.ddp_flat import DDPFlat
from uneven.parallel.fsdp import FSDP
from uneven.parallel.sequence_parallel import SequenceParallel
from uneven.parallel.sharded_optimizer import ShardedOptimizer
from uneven.parallel.strategy import MakeOptimizer, Strategy
from uneven.parallel.tensor_parallel import Plan, TensorParallel
from uneven.parallel.zero2 import Zero2


def make_strategy(
    name: str, model: nn.Module, make_optimizer: MakeOptimizer, group: Group, shares: Sequence[float] | None = None
) -> Strategy:
    """`shares` says how much of the bytes each rank holds, of those that the strategy cuts; None is the same for all.

    A model for 'tensor' or 'sequence' has a method `tensor_plan()`, which says how its layers are cut. One for 'fsdp'
    may have `fsdp_units()`: its modules that are made whole one after another, where these are not simply its blocks.
    """
    if name in ("tensor", "sequence"):
        cut: Callable[..., Strategy] = TensorParallel if name == "tensor" else SequenceParallel
        return cut(model, make_optimizer, group, plan=plan_of(name, model), shares=shares)
    if name == "zero1":
        return DDPBucketed(model, lambda params: ShardedOptimizer(make_optimizer(params), group, shares=shares), group)
    if name == "zero2":
        return Zero2(model, make_optimizer, group, shares=shares)
    if name == "fsdp":
        fsdp_units: Any = getattr(model, "fsdp_units", None)
        return FSDP(model, make_optimizer, group, shares=shares, units=fsdp_units() if callable(fsdp_units) else None)
    assert name in STRATEGIES, name
    return (DDPFlat if name == "ddp-flat" else DDPBucketed)(model, make_optimizer, group)


def plan_of(name: str, model: nn.Module) -> Plan:
    """How the model wants its layers cut; InputError where it does not say."""
    tensor_plan: Any = getattr(model, "tensor_plan", None)
    if not callable(tensor_plan):
        raise InputError(
            f"strategy={name!r} cuts single layers, and {type(model).__name__} does not say which: give it a method "
            "tensor_plan() that returns a plan, as in uneven.parallel.tensor_parallel, or use strategy='fsdp'"
        )
    plan: Plan = tensor_plan()
    return plan
