"""What a rank of a replay trains in a local policy, and when it enters and merges rounds: as the log has it.

Called by train/events.py in place of the window controller, in every generation anew.
"""

from collections import deque

from uneven.data.replay import read_log
from uneven.policy.recorded import RecordedSchedule, RecordedWindows
from uneven.train.engine import Engine


def make_recorded_schedule(engine: Engine) -> tuple[RecordedWindows, RecordedSchedule]:
    config, axis, info = engine.config, engine.axis, engine.rank_info
    assert config.replay is not None, "of a replay only"
    next_event = engine.events.next_event
    if (recorded := info.recorded) is None:
        log = read_log(config.replay, axis, info.world_size, config.to_json(), True, machines=info.roster.machines)
        speeds = [float(len(parts)) for parts in log.parts]
        windows = RecordedWindows(log.rounds[info.rank], info.world_size, next_event, speeds)
        windows.stop_rounds = log.stop_rounds
        return windows, RecordedSchedule(windows, deque(slot for slot, _, _ in log.parts[info.rank]), axis.total)
    generation = recorded.generations[info.generation]
    spans = [recorded.span(name, generation.number) for name in generation.members]
    speeds = [float(stop - first) for first, stop in spans]
    windows = RecordedWindows(recorded.rounds_of(info.member, generation.number), info.world_size, next_event, speeds)
    first, stop = recorded.span(info.member, generation.number)
    return windows, RecordedSchedule(
        windows,
        deque(slot for slot, _, _ in recorded.logs[info.member][first:stop]),
        axis.total,
        parts=first,
        is_last=generation.end is None,
        open_slot=recorded.open_slot(generation.number, axis.total),
    )
