"""What a rank runs by itself before the group forms: to check its loss, for its memory cap, its kernels, its speed.

Called by the worker, and by benchmarks for a device alone, where `engine.can_warm_up`. Invariant: the engine is
afterwards as it was before (step/no_trace.py), but for its caps, captured graphs and what CUDA has chosen.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch import nn

from uneven.data.feed import Micros
from uneven.policy.axis import Part
from uneven.policy.finish import Cost
from uneven.step.capture import can_capture
from uneven.step.captured import CapturedStep
from uneven.step.graph import GraphStep
from uneven.step.measure import measure_cost, probe_cap, room_bytes
from uneven.step.no_trace import no_trace
from uneven.step.token_mean import BATCHES, TokenMeanCheck, named_tensors
from uneven.train.engine import Engine


def check_loss(engine: Engine, *, may_grow: bool) -> None:
    """InputError where losses are means over tokens and batches of one step are weighted by their samples.

    On rank 0 alone: nothing of it is left, and an error there ends the run. `may_grow`: other ranks may join this one.
    """
    config = engine.config
    info = engine.rank_info
    axis = engine.axis
    slot = axis.slot(0)
    is_cut = engine.micro_batch_size(slot.samples) < slot.samples
    if not config.is_local and not config.is_model_parallel:
        is_cut |= info.world_size > 1 or may_grow
    if not config.check_loss or not is_cut or info.rank > 0 or info.is_newcomer:
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
