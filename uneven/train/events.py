"""What LocalSGD starts from: window settings and slot schedule, with the events on the axis; and what it prints."""

from collections.abc import Mapping, Sequence
from typing import Any

from uneven.comm.gather import gather_json
from uneven.comm.group import Group
from uneven.config import RunConfig
from uneven.policy.events import Events
from uneven.policy.finish import Cost
from uneven.policy.ledger import Ledger
from uneven.policy.recorded import RecordedSchedule, RecordedWindows
from uneven.policy.slot_schedule import SlotSchedule, first_free_slot
from uneven.policy.stream_axis import StreamAxis
from uneven.policy.subset import advice, forecast_local
from uneven.policy.windows import LocalSGDConfig, RoundReport, Windows
from uneven.step.costs import measure_sum_ms
from uneven.train.claims import SlotClaims
from uneven.train.engine import Engine
from uneven.train.recorded_schedule import make_recorded_schedule
from uneven.train.synchronizer import Wish, wished


def local_sgd_config(config: RunConfig) -> LocalSGDConfig:
    """The window settings of a run."""
    default = LocalSGDConfig()
    anchor, max_anchor = LocalSGDConfig.anchors(config.anchor, config.max_anchor)
    return LocalSGDConfig(
        is_async=config.policy == "async",
        anchor=anchor,
        max_anchor=max_anchor,
        overhead_target=config.overhead_target or default.overhead_target,
        divergence_threshold=config.divergence_threshold or default.divergence_threshold,
        shares=config.shares,
    )


def make_slot_schedule(
    engine: Engine, claims: SlotClaims, costs: Sequence[Cost]
) -> tuple[Windows, SlotSchedule] | tuple[RecordedWindows, RecordedSchedule]:
    """This rank's slot schedule and its copy of the window controller; a replay reads both from the log."""
    config, axis, rank = engine.config, engine.axis, engine.rank_info.rank
    next_event = engine.events.next_event
    speeds = [1.0 / cost.time_ms(axis.slot_size) for cost in costs]
    if config.replay is not None:
        return make_recorded_schedule(engine)
    is_measured = engine.can_warm_up and config.shares is None
    slot_ms = [1.0 / speed for speed in speeds] if is_measured else None
    ranks, may_end = engine.rank_info.world_size, isinstance(axis, StreamAxis)
    windows = Windows(local_sgd_config(config), ranks, axis.slot_size, next_event, slot_ms, may_end)
    windows.resume_at(engine.trained)
    schedule = SlotSchedule(windows, rank, axis.total, None, config.max_staleness)
    if config.policy == "async":
        schedule.claim, schedule.ahead = claims.claim, claims
    schedule.lookahead = engine.feed.lookahead
    schedule.parts = len(engine.log)
    return windows, schedule


def describe_guard(fields: Mapping[str, Any], before: float) -> str:
    """The line about the guard's decision on the anchor."""
    verb = "does not grow above" if fields["anchor"] == before else "shrinks to"
    return (
        f"  guard: replicas diverge (relative divergence {fields['divergence']:.3g}): the window {verb} "
        f"{fields['anchor']:.0f} batches of the slowest device; a smaller learning rate or lr_scale=1.0 helps"
    )


def describe_lr_scale(lr: float, scale: float, rule: float | str) -> str:
    return (
        f"  learning rate {lr:g} -> {scale * lr:g} (x{scale:.2f}, lr_scale={rule!r}): averaging params "
        "over devices makes steps smaller; lr_scale=1.0 turns this off"
    )


def note_shares(engine: Engine, counts: Sequence[int], costs: Sequence[Cost], *, is_start: bool) -> list[str]:
    """Put every rank's share on the timeline; at the start of a run returns lines of advice, by a collective."""
    is_measured = engine.can_warm_up and not engine.config.has_fixed_shares
    slot_ms = [cost.time_ms(engine.axis.slot_size) for cost in costs]
    alone = [1e3 * engine.axis.slot_size / ms for ms in slot_ms] if is_measured else []
    engine.recorder.event("shares", slot=0 if is_start else engine.trained, shares=list(counts), alone=alone)
    return local_advice(engine, engine.rank_info.group, costs) if is_measured and is_start else []


def local_advice(engine: Engine, group: Group, costs: Sequence[Cost]) -> list[str]:
    """Lines where fewer devices would be faster; a collective."""
    round_ms, limits = measure_sum_ms(group, engine.model), local_sgd_config(engine.config)
    found = forecast_local(costs, engine.axis.slot_size, round_ms, limits.max_anchor, limits.overhead_target)
    return advice(found, [str(device) for device in engine.rank_info.devices])


def pass_epoch(
    engine: Engine,
    windows: Windows | RecordedWindows,
    schedule: SlotSchedule | RecordedSchedule,
    epoch: int,
    trained: int,
    rows: Sequence[RoundReport],
) -> tuple[int, list[RoundReport]]:
    """All ranks stand still and pass the epoch's end, with `trained` samples of it; returns the end and the reports."""
    assert isinstance(windows, Windows), "a replay leaves nothing out"
    assert isinstance(schedule, SlotSchedule), "as above"
    end = windows.due = windows.event = engine.axis.epoch_end(epoch)
    schedule.drop_before(end)
    engine.skip_epoch(epoch, trained)
    return end, [row._replace(next_slot=max(row.next_slot, float(end)), returned=0.0, kept=0.0) for row in rows]


def follow_wish(engine: Engine, windows: Windows | RecordedWindows, rows: Sequence[RoundReport]) -> Wish:
    """Where a rank wants to save or evaluate, make the first slot at which all ranks can still meet an event.

    Returns what any rank wants. Call it on all ranks before `windows` notes the round. A wish is repeated until that
    slot is reached.
    """
    wish = wished(row.wish for row in rows)
    if wish and isinstance(windows, Windows):
        slot = first_free_slot(rows, windows.event)
        if request(engine.events, slot, wish, windows.passed):
            windows.learn_event(slot)
    return wish


def request(events: Events, slot: int, wish: Wish, passed: int) -> bool:
    """Save or evaluate at this slot, unless another one that is still to come was requested; whether it is new."""
    saves = bool(wish & Wish.SAVE) and not any(known > passed for known in events.extra_saves)
    evaluates = bool(wish & Wish.EVALUATE) and not any(known > passed for known in events.extra_evaluations)
    if saves:
        events.request_save(slot)
    if evaluates:
        events.request_evaluation(slot)
    return saves or evaluates


def stopped_ledger(engine: Engine, last_event: int, mark: int) -> Ledger:
    """What is trained where all ranks were stopped: everything before the last event, and what ranks have done since.

    A collective. `mark`: this rank's number of parts at that event.
    """
    own = [slot for slot, _, _ in engine.log[mark:]]
    gathered = gather_json(engine.rank_info.group, own)
    known = engine.ledger.advanced_to(max(last_event, engine.ledger.trained))
    return known.after(slot for data in gathered for slot in data)
