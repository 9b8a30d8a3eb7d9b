"""What a local pace starts from: the events on the axis, the first window, and who takes which slot."""

from collections import deque
from collections.abc import Callable, Sequence

from uneven.config import RunConfig
from uneven.data.replay import read_log
from uneven.policy.finish import Cost
from uneven.policy.recorded import RecordedCourse, RecordedWindows
from uneven.policy.slot_schedule import Course
from uneven.policy.windows import Terms, Windows
from uneven.train.engine import Rig


def find_events(rig: Rig) -> Callable[[int], int]:
    """The first slot after a given one at which all ranks meet: for an evaluation, a checkpoint or the end of the run.

    In a loop of the user's own they meet after every epoch.
    """
    axis, config, evaluation = rig.axis, rig.config, rig.task.evaluation
    has_any = not rig.is_rehearsed or evaluation is not None or config.checkpoint_every is not None

    def meets_after(epoch: int) -> bool:
        is_evaluated = evaluation is not None and config.evaluates(epoch, evaluation.every)
        return not rig.is_rehearsed or is_evaluated or config.checkpoints(epoch)

    def next_event(slot: int) -> int:
        epoch = slot // axis.slots_per_epoch if has_any else axis.epochs - 1
        while epoch < axis.epochs - 1 and not meets_after(epoch):
            epoch += 1
        return min(axis.epoch_end(epoch), axis.total)

    return next_event


def terms_of(config: RunConfig) -> Terms:
    """The settings of windows; of anchor and max_anchor the one that was given moves the other's default."""
    default = Terms()
    anchor = config.anchor or min(default.anchor, config.max_anchor or default.anchor)
    return Terms(
        is_async=config.policy == "async",
        anchor=anchor,
        max_anchor=config.max_anchor or max(default.max_anchor, anchor),
        overhead_target=config.overhead_target or default.overhead_target,
        divergence_threshold=config.divergence_threshold or default.divergence_threshold,
        shares=config.shares,
    )


def open_course(
    rig: Rig, claim: Callable[[int], int], costs: Sequence[Cost]
) -> tuple[Windows, Course] | tuple[RecordedWindows, RecordedCourse]:
    """This rank's course and its copy of the controller; from a log where an earlier run is repeated."""
    config, axis, rank = rig.config, rig.axis, rig.seat.rank
    next_event = find_events(rig)
    speeds = [1.0 / cost.time_ms(axis.slot_size) for cost in costs]
    if config.replay is not None:
        log = read_log(config.replay, axis, rig.seat.size, config.to_json(), is_local=True)
        recorded = RecordedWindows(log.rounds[rank], rig.seat.size, next_event, [float(len(one)) for one in log.parts])
        return recorded, RecordedCourse(recorded, deque(slot for slot, _, _ in log.parts[rank]), axis.total)
    is_measured = rig.is_rehearsed and config.shares is None
    slot_ms = [1.0 / speed for speed in speeds] if is_measured else None
    windows = Windows(terms_of(config), rig.seat.size, axis.slot_size, next_event, slot_ms)
    is_async = config.policy == "async"
    return windows, Course(windows, rank, axis.total, claim if is_async else None, config.max_lead)
