"""How many samples a CUDA device holds at once, found by trying; called by the worker before anything is measured."""

from uneven.policy.axis import Part
from uneven.step.caps import probe_cap, room_bytes
from uneven.step.warmup import no_trace
from uneven.train.engine import Engine


def find_cap(engine: Engine) -> None:
    """Limit this rank's cap to what fits, where shares may grow and no memory_cap was given."""
    config, slot, info = engine.config, engine.axis.slot(0), engine.rank_info
    is_moving = config.policy == "balanced" and info.world_size > 1 and not config.has_fixed_shares
    if engine.device.type != "cuda" or not is_moving or config.memory_cap is not None:
        return
    engine.recorder.enter("compile")

    def run_at_once(samples: int) -> None:
        _, micros = next(engine.feed.stream([Part(slot, 0, samples, samples)]))
        engine.eager([(engine.feed.open(inputs), many) for inputs, many in micros], samples)

    names = [device.torch_name for device in info.devices]
    room = room_bytes(engine.device, names.count(info.device.torch_name))
    if config.compile == "graph":
        room /= 2  # captured graphs keep their memory while a new size runs eagerly
    with no_trace(engine.eager, engine.device):
        cap = probe_cap(run_at_once, engine.device, room, engine.least, slot.samples)
    found = [float("inf")] * info.world_size
    found[info.rank] = float(max(cap, engine.least))
    engine.limit_caps(found)
