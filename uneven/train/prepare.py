"""What a rank runs before the first slot: checks, memory cap, warm-up, speed, activations, and the strategy of the run.

Called by the worker, and by benchmarks for a device alone, where `engine.can_warm_up`. What comes before the group
forms leaves the engine as it was (step/no_trace.py), but for its caps, captured graphs and what CUDA has chosen.
`apply_strategy` runs on all ranks alike once the group has formed: samples are shared by speed and bytes by memory,
independently.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch import nn
from torch.optim import Optimizer

from uneven.comm.collectives import broadcast_params
from uneven.comm.gather import gather_rows
from uneven.comm.group import Group
from uneven.config import SHARDED
from uneven.data.feed import Micros
from uneven.errors import InputError
from uneven.hardware.system import CPU_PART, read_memory
from uneven.parallel.activations import Activations
from uneven.parallel.catalog import DEFAULT_STRATEGY, check_optimizer, make_strategy
from uneven.parallel.ddp import Replicated
from uneven.parallel.fsdp import FSDP
from uneven.parallel.muon_adamw import AfterReducer, MuonAdamW, ThreePhase
from uneven.parallel.sharded_optimizer import ShardedOptimizer
from uneven.parallel.strategy import FitOptions, MakeOptimizer, Strategy
from uneven.policy.axis import Part
from uneven.policy.finish import Cost
from uneven.policy.redundancy import copy_ring, held, shares_with_copies
from uneven.step.capture import can_capture
from uneven.step.captured import CapturedStep
from uneven.step.finite import OwnCheck
from uneven.step.graph import GraphStep
from uneven.step.measure import measure_cost, probe_cap, room_bytes
from uneven.step.no_trace import no_trace
from uneven.step.several import SeveralSteps
from uneven.step.strategy_step import StrategyStep
from uneven.step.token_mean import BATCHES, TokenMeanCheck, named_tensors
from uneven.train.engine import Engine, check_dense, seed_random


def check_loss(engine: Engine, *, may_grow: bool) -> None:
    """InputError where losses are means over tokens and batches of one step are weighted by their samples.

    On rank 0 alone: nothing of it is left, and an error there ends the run. `may_grow`: other ranks may join this one.
    Not where the params are made when the group has formed.
    """
    config = engine.config
    info = engine.rank_info
    axis = engine.axis
    slot = axis.slot(0)
    is_cut = engine.micro_batch_size(slot.samples) < slot.samples
    if not config.is_local and not config.is_model_parallel:
        is_cut |= info.world_size > 1 or may_grow
    is_elsewhere = info.rank > 0 or info.is_newcomer or engine.blueprint is not None
    if not config.check_loss or not is_cut or is_elsewhere:
        return
    check = TokenMeanCheck(engine.model)
    if engine.reader is not None:
        if info.world_size == 1 or config.is_replicated:
            _look_at_first_batches(engine, check)
        return
    engine.recorder.enter("compile")
    size = max(2, config.batch_size)
    slots = (axis.slot(place) for place in range(min(BATCHES, axis.slots_per_epoch, axis.total)))
    for _, micros in engine.feed.stream(Part(slot, 0, min(size, slot.samples), size) for slot in slots):
        (inputs, samples), *_ = micros
        if check.look(engine.task.train_step, engine.feed.open(inputs), samples):
            break
    engine.recorder.enter("setup")


def _look_at_first_batches(engine: Engine, check: TokenMeanCheck) -> None:
    """Those of a stream are looked at when they are trained, since nobody could put them back."""
    train_step = engine.task.train_step

    def step(model: nn.Module, batch: Any) -> Any:
        samples = next((len(tensor) for _, tensor in named_tensors(batch, "batch") if tensor.ndim), 0)
        if check.look(train_step, batch, samples):
            engine.step.use_train_step(train_step)
        return train_step(model, batch)

    engine.step.use_train_step(step)


def find_cap(engine: Engine) -> None:
    """Limit this rank's cap to what its CUDA device holds, found by trying.

    Only where shares may grow, and without memory_cap.
    """
    config = engine.config
    slot = engine.axis.slot(0)
    info = engine.rank_info
    is_moving = config.policy == "balanced" and info.world_size > 1 and not config.has_fixed_shares
    if engine.device.type != "cuda" or not is_moving or config.memory_cap is not None:
        return
    engine.recorder.enter("compile")

    def run_at_once(samples: int) -> None:
        _run_eagerly(engine, *next(engine.feed.stream([Part(slot, 0, samples, samples)])))

    names = [device.torch_name for device in info.devices]
    room = room_bytes(engine.device, names.count(info.device.torch_name))
    if config.compile == "graph":
        room /= 2  # captured graphs keep their memory while a new size runs eagerly
    with no_trace(engine.step, engine.device):
        cap = probe_cap(run_at_once, engine.device, room, engine.least, slot.samples)
    found = [float("inf")] * info.world_size
    found[info.rank] = float(max(cap, engine.least))
    engine.limit_caps(found)


def warm_up(engine: Engine) -> None:
    """Compile, capture and let CUDA choose its kernels before the training clock starts.

    Runs both sizes of slot, the full one and an epoch's shorter last one. An eager CPU needs none of this.
    """
    compile = engine.config.compile
    axis = engine.axis
    recorder = engine.recorder
    if compile == "off" and engine.device.type == "cpu":
        return
    recorder.enter("compile")
    if compile == "default":
        engine.model.compile()
    ends = (axis.slot(place).samples for place in (0, axis.slots_per_epoch - 1))
    parts = {samples: _first_part(engine, samples) for samples in ends}
    phase = "compile" if compile == "default" else "warm-up"
    with recorder.phase(phase), no_trace(engine.step, engine.device):
        for part, micros in engine.feed.stream(parts.values()):
            _run_eagerly(engine, part, micros)
    if compile == "graph" and can_capture(engine.device):
        with recorder.phase("capture"):
            capture(engine, parts[axis.slot(0).samples])
    engine.run_ahead.drain()
    recorder.enter("setup")


def measure(engine: Engine) -> Cost:
    """This rank's own speed and memory cap; round 0 sets the first shares from them."""
    engine.recorder.enter("compile")
    slot = engine.axis.slot(0)

    @lru_cache(maxsize=None if engine.config.num_workers else 0)
    def read(samples: int) -> tuple[Part, Micros]:
        # Starting loader processes anew for every step would be counted as the step's cost.
        return next(engine.feed.stream([Part(slot, 0, samples, engine.micro_batch_size(samples))]))

    def run_step(samples: int) -> None:
        began_ns = engine.recorder.clock()
        part, micros = read(samples)
        engine.local_step(part, engine.open(micros), began_ns)
        engine.run_ahead.drain()

    with engine.recorder.phase("measure"), no_trace(engine.step, engine.device), engine.step.rehearsal():
        expected = _expected_samples(engine, slot.samples)
        samples = max(expected, min(engine.least, slot.samples))  # BatchNorm: alone as yet
        cost = measure_cost(run_step, samples, engine.least, untimed=engine.step.untimed_steps)
    engine.recorder.enter("setup")
    return replace(cost, cap=engine.caps[engine.rank_info.rank])


def capture(engine: Engine, part: Part) -> None:
    """Capture the whole step; or, where gradients are summed over ranks, forward and backward.

    The latter is only a trial here: the graphs that train write into the reducer's buckets, which are allocated when
    the group has formed.
    """
    if engine.rank_info.world_size == 1 or engine.config.is_local:
        ((part, micros),) = engine.feed.stream([part])
        if not isinstance(engine.step, GraphStep):
            engine.use_step(GraphStep(engine.step, engine.feed.open))
        engine.step.prepare(micros, part.samples)
        return
    step = CapturedStep(engine.step, engine.feed.open)
    engine.use_step(step)
    with no_trace(step, engine.device), step.rehearsal():
        for _, micros in engine.feed.stream([part, part]):  # the first runs eagerly
            step.start_alone(micros, part.samples)


def _run_eagerly(engine: Engine, part: Part, micros: Micros) -> None:
    engine.step([(engine.feed.open(inputs), samples) for inputs, samples in micros], part.samples)


def _first_part(engine: Engine, slot_samples: int) -> Part:
    """A part of the first slot, as large as this rank's part of a slot of so many samples."""
    samples = _expected_samples(engine, slot_samples)
    return Part(engine.axis.slot(0), 0, samples, engine.micro_batch_size(samples))


def _expected_samples(engine: Engine, slot_samples: int) -> int:
    """The samples of a slot that this rank trains before any speed is known: an equal share."""
    return slot_samples if engine.config.is_local else -(-slot_samples // engine.rank_info.world_size)


MEASURED_SAMPLES = 8  # a forward of a few samples fits anywhere, and activations grow with their number


def apply_strategy(
    engine: Engine,
    group: Group,
    num_stats: int,
    speeds: Sequence[float],
    is_leaving: Callable[[Sequence[float]], bool],
) -> list[str]:
    """Make the strategy and give its reducer, optimizer or step to the engine; returns lines to print.

    `num_stats`: the length of the row of statistics that each rank sends with every gradient sum; `is_leaving(row)`:
    whether it says that the rank takes no part in the step. `speeds`: of the ranks, by which they share work that is
    not samples.
    """
    config = engine.config
    _refuse_max_norm(engine.model)
    if isinstance(engine.step, SeveralSteps):
        for member in engine.step.optimizers.members.values():
            check_dense(member, config)
        engine.step.connect(group, num_stats - len(OwnCheck._fields), is_leaving, engine.recorder.enter)
        return []
    check_dense(engine.optimizer, config)
    check_optimizer(config.strategy, engine.optimizer, config.redundancy)
    if isinstance(engine.optimizer, MuonAdamW):
        return _apply_muon(engine, group, num_stats, speeds)
    shares = _memory_shares(engine, group) if config.strategy in SHARDED else None
    schedule = engine.schedule.state_dict(first_needed=0)
    notes: list[str] = []
    if config.is_replicated:
        optimizer = _apply_replicated(engine, group, num_stats, shares)
    else:
        assert config.strategy is not None
        if config.is_model_parallel:
            _refuse_dropout(config.strategy, engine.model)
        make_optimizer = engine.task.make_optimizer
        strategy = make_strategy(
            config.strategy,
            engine.model,
            make_optimizer,
            group,
            shares,
            bucket_mb=config.bucket_mb,
            redundancy=config.redundancy,
            machines=engine.rank_info.roster.machines,
        )
        notes = _make_params(engine, strategy, group)
        if config.is_model_parallel:
            Activations(engine.model, config.activations)
        step = StrategyStep(engine.step, strategy, group, is_model_parallel=config.is_model_parallel)
        engine.use_strategy(strategy, step)
        optimizer = strategy.optimizer
    if shares is None:
        return []
    engine.divide_whole_state(schedule)
    return [
        f"  {config.strategy}: bytes {_source(engine)}, {_percent(_held(optimizer, shares))}"
        f"{_with_copies(optimizer)}{_whole_tensors(optimizer)}",
        _describe_memory(engine, group, _parts(optimizer, shares)),
        *notes,
    ]


def send_model(engine: Engine, group: Group) -> None:
    """All ranks take rank 0's params and buffers, but where params are made when they have been sharded."""
    tensors = (*engine.model.parameters(), *engine.model.buffers())
    if engine.config.strategy == "fsdp":
        is_later = [flag for (flag,) in gather_rows(group, [float(engine.blueprint is not None)])]
        if min(is_later) < max(is_later):
            raise InputError(
                f"strategy='fsdp': make_model() can be run shard by shard on rank {is_later.index(1.0)}, and not on "
                f"rank {is_later.index(0.0)}; it must do the same on every rank"
            )
        if any(is_later):
            return
    broadcast_params(group, tensors)


def _make_params(engine: Engine, strategy: Strategy, group: Group) -> list[str]:
    """Make the params shard by shard, where they were not made before they were sharded; returns lines to print."""
    blueprint, config = engine.take_blueprint(), engine.config
    if blueprint is None:
        return []
    assert isinstance(strategy, FSDP), "no other strategy shards params that are made later"
    blueprint.make(lambda: seed_random(config.seed, is_own_loop=False), strategy.put)
    blueprint.compare(group)
    broadcast_params(group, engine.model.buffers())
    unchecked = "; the loss was not looked at for a mean over tokens" if config.check_loss else ""
    how, name = "shard by shard", blueprint.unrepeatable
    if name is not None:
        how = f"whole first: {name} is read after its values came from another tensor (in halves, make it so at once)"
    return [f"  fsdp: {blueprint.nbytes / 1e6:,.0f} MB of params were made {how}{unchecked}"]


def _apply_replicated(engine: Engine, group: Group, num_stats: int, shares: Sequence[float] | None) -> Optimizer:
    is_sharded = engine.config.strategy in SHARDED

    def make_optimizer(params: object) -> Optimizer:
        # The engine's own may be compiled into a step already; a sharded one must be made from fresh param groups.
        return engine.task.make_optimizer(params) if is_sharded else engine.optimizer

    strategy = _make_replicated(engine, engine.config.strategy, make_optimizer, group, num_stats, shares)
    engine.use_reducer(strategy.reducer)
    if is_sharded:
        engine.use_strategy(strategy)
    return strategy.optimizer


def _make_replicated(
    engine: Engine,
    name: str | None,
    make_optimizer: MakeOptimizer,
    group: Group,
    num_stats: int,
    shares: Sequence[float] | None = None,
) -> Replicated:
    strategy = make_strategy(
        name or DEFAULT_STRATEGY,
        engine.model,
        make_optimizer,
        group,
        shares,
        bucket_mb=engine.config.bucket_mb,
        redundancy=engine.config.redundancy if name in SHARDED else 0,
        machines=engine.rank_info.roster.machines,
        options=FitOptions(
            # SyncBatchNorm's collectives in backward need one order on all ranks, so no bucket may be sent in between;
            # and a captured backward cannot send anything.
            overlap=not engine.batchnorm_sync.layers and not engine.step.is_captured,
            num_stats=num_stats,
            init_sync=False,  # the worker has compared the models and sent rank 0's values when the group formed
        ),
    )
    assert isinstance(strategy, Replicated)
    return strategy


def _apply_muon(engine: Engine, group: Group, num_stats: int, speeds: Sequence[float]) -> list[str]:
    """Spread a MuonAdamW over the ranks: whole matrices by speed, the elements of the rest by memory.

    It sums gradients itself when it steps, in its three phases. Where a DDP was asked for, or the summed gradients are
    needed before the step (a loss scaler, a captured backward), the reducer sums them, and it updates and sends.
    """
    config = engine.config
    memory = _memory_shares(engine, group)
    schedule = engine.schedule.state_dict(first_needed=0)
    is_asked = config.strategy not in (None, "zero1") or config.bucket_mb is not None
    sums = not (is_asked or engine.step.is_captured or config.precision == "fp16")
    plain = engine.task.make_optimizer(engine.model.parameters())  # the engine's own may have a schedule's rates
    assert isinstance(plain, MuonAdamW)
    optimizer = plain.over(group, memory=memory, speed=speeds, sums_gradients=sums)
    if sums:
        phased = ThreePhase(engine.model, optimizer)
        engine.use_strategy(phased, StrategyStep(engine.step, phased, group))
    else:
        name = "ddp-flat" if config.strategy in ("ddp-flat", "zero1-flat") else "ddp-bucketed"
        strategy = _make_replicated(engine, name, lambda _: optimizer, group, num_stats)
        engine.use_reducer(strategy.reducer)
        engine.use_strategy(AfterReducer(strategy, optimizer))
    engine.divide_whole_state(schedule)
    how = "sums gradients, updates and sends in turn" if sums else "updates and sends what a DDP has summed"
    return [
        f"  MuonAdamW over {group.world_size} devices: matrices by speed, {_percent(speeds)}; the rest "
        f"{_source(engine)}, {_percent(memory)}; {how}"
    ]


def _source(engine: Engine) -> str:
    return "by memory" if engine.config.memory_shares is None else "as given"


def _parts(optimizer: Optimizer, shares: Sequence[float]) -> list[float]:
    """What each rank holds as a part of all that is sharded; 2 together where everything is there twice."""
    copies = optimizer.copies if isinstance(optimizer, ShardedOptimizer) else None
    return [(1 if copies is None else 2) * part / sum(parts) for parts in [_held(optimizer, shares)] for part in parts]


def _held(optimizer: Optimizer, shares: Sequence[float]) -> Sequence[float]:
    """What each rank holds, of all that is sharded: the shares, or with redundancy what came of them."""
    copies = optimizer.copies if isinstance(optimizer, ShardedOptimizer) else None
    return shares if copies is None else held(shares_with_copies(shares, copies), copies)


def _with_copies(optimizer: Optimizer) -> str:
    copies = optimizer.copies if isinstance(optimizer, ShardedOptimizer) else None
    if copies is None:
        return ""
    everything = ", so that each of the two holds everything" if len(copies) - copies.count(None) == 2 else ""
    return f" of two copies of each shard, on different devices{everything}"


def _whole_tensors(optimizer: Optimizer) -> str:
    """The end of a line, where the optimizer has whole tensors and so the shares are met only roughly."""
    if not isinstance(optimizer, ShardedOptimizer) or not optimizer.by_tensors:
        return ""
    return f", in whole tensors: {type(optimizer.inner).__name__} is not known to be elementwise"


def choose_activations(engine: Engine) -> list[str]:
    """With activations='auto', recompute the largest blocks until the rest fits the device; returns lines to print.

    On a CPU everything is kept: there the operating system has no fixed budget to go by.
    """
    if engine.config.activations != "auto":
        return []
    budget_bytes = activation_budget(engine)
    if budget_bytes is None:
        return []
    slot = engine.axis.slot(0)
    samples = min(engine.config.batch_size, slot.samples)
    measured = min(samples, MEASURED_SAMPLES)

    def run_forward() -> None:
        _, ((inputs, _),) = next(engine.feed.stream([Part(slot, 0, measured, measured)]))
        with engine.step.precision.region():
            engine.task.train_step(engine.model, engine.feed.open(inputs))

    with no_trace(engine.step, engine.device):
        found = Activations(
            engine.model, "auto", measure=run_forward, budget_bytes=budget_bytes, scale=samples / measured
        )
    recomputed = [block.name for block in found.blocks if block.policy == "recompute"]
    total = sum(block.bytes or 0 for block in found.blocks)
    kept = sum(block.bytes or 0 for block in found.blocks if block.policy == "keep")
    return [
        f"  activations='auto': keeps {kept / 1e6:,.0f} of {total / 1e6:,.0f} MB, with {budget_bytes / 1e6:,.0f} MB "
        f"free; recomputes {', '.join(recomputed) or 'nothing'}"
    ]


def activation_budget(engine: Engine) -> float | None:
    """Bytes of a CUDA device that are left beside params, gradients and optimizer state; None on a CPU."""
    if engine.device.type != "cuda":
        return None
    config, rank_info = engine.config, engine.rank_info
    names = [device.torch_name for device in rank_info.devices]
    room = room_bytes(engine.device, names.count(rank_info.device.torch_name))
    shares = config.memory_shares or (1.0,) * rank_info.world_size
    own = shares[rank_info.rank] / sum(shares)
    if config.redundancy:
        copies = copy_ring(shares, rank_info.roster.machines)
        own = held(shares_with_copies(shares, copies), copies)[rank_info.rank]
    return max(0.0, room - _held_bytes(engine, own))


def _held_bytes(engine: Engine, own: float) -> float:
    """Params, gradients and Adam's two moments: what the strategy shards counts by this rank's share, `own`.

    Frozen params have neither gradients nor moments.
    """
    strategy = engine.config.strategy or ""
    times = {"zero1": 2 + 2 * own, "zero1-flat": 2 + 2 * own, "zero2": 1 + 3 * own, "fsdp": 4 * own}.get(strategy, 4.0)
    params = list(engine.model.parameters())
    trained = sum(param.nbytes for param in params if param.requires_grad)
    frozen = sum(param.nbytes for param in params) - trained
    return times * trained + (own if strategy == "fsdp" else 1.0) * frozen


def _describe_memory(engine: Engine, group: Group, parts: Sequence[float]) -> str:
    """A line: what each device is going to hold, of what it may; a collective. `parts`: of what is sharded, by rank."""
    rows = gather_rows(group, [_held_bytes(engine, parts[group.rank]), _memory_bytes(engine)])
    names = map(str, engine.rank_info.devices)
    needs = [
        f"{name} {held / 1e6:,.0f} of {most / 1e6:,.0f} MB" for name, (held, most) in zip(names, rows, strict=True)
    ]
    return f"  memory without activations: {', '.join(needs)}"


def _memory_shares(engine: Engine, group: Group) -> Sequence[float]:
    """As given, or by the memory of the devices."""
    if engine.config.memory_shares is not None:
        return engine.config.memory_shares
    return [memory for (memory,) in gather_rows(group, [_memory_bytes(engine)])]


def _memory_bytes(engine: Engine) -> float:
    """This rank's part of what is free of its device's memory; CPU ranks share a fixed part of the machine's."""
    info = engine.rank_info
    sharing = [device.torch_name for device in info.devices].count(info.device.torch_name)
    if engine.device.type == "cuda":
        return room_bytes(engine.device, sharing)
    return CPU_PART * (read_memory()[0] or 1.0) / sharing


def _refuse_dropout(name: str, model: nn.Module) -> None:
    """Each rank would drop other elements of activations that must be equal on all ranks."""
    kinds = (nn.modules.dropout._DropoutNd,)
    found = [where for where, module in model.named_modules() if isinstance(module, kinds) and module.p > 0]
    if found:
        raise InputError(
            f"strategy={name!r}: {found[0]} drops elements at random, and devices that compute the same samples would "
            "drop different ones; set its p to 0, or use strategy='fsdp'"
        )


def _refuse_max_norm(model: nn.Module) -> None:
    """Its forward scales the rows of its own samples in place: ranks would hold different weights after every step."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise InputError(
                f"{name} has max_norm={module.max_norm}: its forward changes weights by the samples of one device, and "
                "those of several would differ; leave max_norm out and scale the weights in a callback's on_step, or "
                "use policy='cadence'"
            )


def _percent(shares: Sequence[float]) -> str:
    return " : ".join(f"{100 * share / sum(shares):.0f}" for share in shares) + " %"
