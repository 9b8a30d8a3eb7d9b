"""Makes strategies by name; `fit` and the benchmarks make every strategy here, so that they measure what users run."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from uneven.comm.group import Group
from uneven.config import MODEL_PARALLEL, REPLICATED, SHARDED, STRATEGIES
from uneven.errors import InputError
from uneven.parallel.ddp import DDPBucketed, DDPFlat, Zero1, Zero2
from uneven.parallel.elementwise import NEEDS_ELEMENTWISE, refuse_by_elements, refuse_joined
from uneven.parallel.flat_shards import checked_shares
from uneven.parallel.fsdp import FSDP
from uneven.parallel.muon_adamw import MuonAdamW
from uneven.parallel.strategy import NO_OPTIONS, FitOptions, MakeOptimizer, Strategy
from uneven.parallel.tensor_parallel import Plan, SequenceParallel, TensorParallel
from uneven.policy.redundancy import Copies, copy_ring, shares_with_copies

DEFAULT_STRATEGY = "ddp-bucketed"  # of `fit` without a strategy


def make_strategy(
    name: str,
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    group: Group,
    shares: Sequence[float] | None = None,
    *,
    bucket_mb: float | None = None,
    redundancy: int = 0,
    machines: Sequence[int] | None = None,
    options: FitOptions = NO_OPTIONS,
) -> Strategy:
    """`shares`: how much each rank holds of what the strategy shards; None is the same for all.

    With `redundancy` 1 that is with the copy of another rank's shard, which lies on another one of `machines` where
    possible. `options` are for strategies with the whole model on every rank.

    A model for 'tensor' or 'sequence' needs a method `tensor_plan()`, see tensor_parallel.py. A model for 'fsdp' may
    have `fsdp_units()`: the modules that are unsharded one after another, if these are not simply its blocks.
    """
    assert name in STRATEGIES, name
    if name == "ddp-flat":
        return DDPFlat(model, make_optimizer, group, options=options)
    if name == "ddp-bucketed":
        return DDPBucketed(model, make_optimizer, group, bucket_mb=bucket_mb, options=options)
    shares, copies = divide(shares, group, redundancy, machines)
    if name in MODEL_PARALLEL:
        assert copies is None, "see config/conflicts.py"
        parallel = TensorParallel if name == "tensor" else SequenceParallel
        return parallel(model, make_optimizer, group, plan=plan_of(name, model), shares=shares)
    sharding: Any = {"shares": shares, "bucket_mb": bucket_mb, "options": replace(options, copies=copies)}
    if name == "fsdp":
        fsdp_units: Any = getattr(model, "fsdp_units", None)
        return FSDP(model, make_optimizer, group, units=fsdp_units() if callable(fsdp_units) else None, **sharding)
    if name == "zero2":
        return Zero2(model, make_optimizer, group, **sharding)
    return Zero1(model, make_optimizer, group, flat=name == "zero1-flat", **sharding)


def divide(
    shares: Sequence[float] | None, group: Group, redundancy: int, machines: Sequence[int] | None = None
) -> tuple[Sequence[float] | None, Copies | None]:
    """What each rank owns, and whose shard it keeps, so that it holds by `shares`."""
    if not redundancy:
        return shares, None
    memory = checked_shares(shares, group)
    copies = copy_ring(memory, machines)
    return shares_with_copies(memory, copies), copies


def check_optimizer(name: str | None, optimizer: Optimizer, redundancy: int = 0) -> None:
    """InputError where a strategy cannot divide what this optimizer does; before ranks start, and on each rank."""
    if isinstance(optimizer, MuonAdamW):
        if name is not None and name not in REPLICATED:
            raise InputError(
                f"strategy={name!r} with MuonAdamW, which divides its state and its work over the devices by itself: "
                "leave the strategy out, or use 'zero1'"
            )
        if redundancy:
            raise InputError(
                f"redundancy={redundancy} with MuonAdamW, which keeps no copies of what it divides over the devices: "
                "leave redundancy out, or use an optimizer such as AdamW"
            )
    elif name in SHARDED:
        refuse_joined(optimizer)
        if name in NEEDS_ELEMENTWISE:
            refuse_by_elements(optimizer, f"strategy={name!r}")


def plan_of(name: str, model: nn.Module) -> Plan:
    """The model's plan for tensor parallelism; InputError if it has none."""
    tensor_plan: Any = getattr(model, "tensor_plan", None)
    if not callable(tensor_plan):
        raise InputError(
            f"strategy={name!r} shards single layers, and {type(model).__name__} does not name them: give it a method "
            "tensor_plan() that returns a plan, as in uneven.parallel.tensor_parallel, or use strategy='fsdp'"
        )
    plan: Plan = tensor_plan()
    return plan
