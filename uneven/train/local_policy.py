"""The local policy of a run: windows and slot schedule, by measured speeds or as a log has them; the factor on its
learning rates, which follows those speeds (policy/scale.py); and advice by costs.

LocalSGD calls it, as GradientSync calls exact_policy.py.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from uneven.comm.gather import gather_json
from uneven.config import RunConfig
from uneven.data.replay import read_log
from uneven.policy.finish import Cost
from uneven.policy.ledger import Ledger
from uneven.policy.recorded import RecordedSchedule, RecordedWindows
from uneven.policy.round_report import RoundReport
from uneven.policy.scale import CHANGE
from uneven.policy.slot_schedule import SlotSchedule
from uneven.policy.stream_axis import StreamAxis
from uneven.policy.subset import advice, forecast_local
from uneven.policy.windows import LocalSGDConfig, Windows
from uneven.step.measure import measure_sum_ms
from uneven.train.claims import SlotClaims
from uneven.train.engine import Engine


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
    config = engine.config
    axis = engine.axis
    rank = engine.rank_info.rank
    next_event = engine.events.next_event
    speeds = [1.0 / cost.time_ms(axis.slot_size) for cost in costs]
    if config.replay is not None:
        return _make_recorded_schedule(engine)
    is_measured = engine.can_warm_up and config.shares is None
    slot_ms = [1.0 / speed for speed in speeds] if is_measured else None
    ranks, may_end = engine.rank_info.world_size, isinstance(axis, StreamAxis)
    windows = Windows(local_sgd_config(config), ranks, axis.slot_size, next_event, slot_ms, may_end)
    windows.resume_at(engine.state.trained)
    schedule = SlotSchedule(windows, rank, axis.total, None, config.max_staleness)
    if config.policy == "async":
        schedule.claim, schedule.ahead = claims.claim, claims
    schedule.lookahead = engine.feed.lookahead
    schedule.parts = len(engine.state.log)
    return windows, schedule


def _make_recorded_schedule(engine: Engine) -> tuple[RecordedWindows, RecordedSchedule]:
    """What this rank trains in a replay, and when it enters and merges rounds."""
    config = engine.config
    axis = engine.axis
    info = engine.rank_info
    assert config.replay is not None, "of a replay only"
    log = read_log(config.replay, axis, info.world_size, config.to_json(), True, machines=info.roster.machines)
    speeds = [float(len(parts)) for parts in log.parts]
    windows = RecordedWindows(log.rounds[info.rank], info.world_size, engine.events.next_event, speeds)
    windows.stop_rounds = log.stop_rounds
    return windows, RecordedSchedule(windows, deque(slot for slot, _, _ in log.parts[info.rank]), axis.total)


def describe_guard(fields: Mapping[str, Any], before: float) -> str:
    """The line about the guard's decision on the anchor."""
    verb = "does not grow above" if fields["anchor"] == before else "shrinks to"
    return (
        f"  guard: replicas diverge (relative divergence {fields['divergence']:.3g}): the window {verb} "
        f"{fields['anchor']:.0f} batches of the slowest device; a smaller learning rate or lr_scale=1.0 helps"
    )


def note_shares(engine: Engine, counts: Sequence[int], costs: Sequence[Cost], *, is_start: bool) -> list[str]:
    """Put every rank's share on the timeline; at the start of a run returns lines of advice, by a collective."""
    is_measured = engine.can_warm_up and not engine.config.has_fixed_shares
    slot_ms = [cost.time_ms(engine.axis.slot_size) for cost in costs]
    alone = [1e3 * engine.axis.slot_size / ms for ms in slot_ms] if is_measured else []
    engine.recorder.event("shares", slot=0 if is_start else engine.state.trained, shares=list(counts), alone=alone)
    return _advise(engine, costs) if is_measured and is_start else []


def _advise(engine: Engine, costs: Sequence[Cost]) -> list[str]:
    """A line where fewer devices would be faster; a collective."""
    round_ms, limits = measure_sum_ms(engine.rank_info.group, engine.model), local_sgd_config(engine.config)
    found = forecast_local(costs, engine.axis.slot_size, round_ms, limits.max_anchor, limits.overhead_target)
    return advice(found, [str(device) for device in engine.rank_info.devices])


def leave_out_rest(
    engine: Engine, schedule: SlotSchedule | RecordedSchedule, epoch: int, trained: int, rows: Sequence[RoundReport]
) -> tuple[int, list[RoundReport]]:
    """In a round in which all ranks ask for it: end the epoch, of which they have trained so many samples.

    Returns the slot of its end and the reports, as if all ranks had come to it.
    """
    assert isinstance(schedule, SlotSchedule), "a replay leaves nothing out"
    end = engine.axis.epoch_end(epoch)
    schedule.drop_before(end)
    engine.state.skip_epoch(epoch, trained)
    return end, [row._replace(next_slot=max(row.next_slot, float(end)), returned=0.0, kept=0.0) for row in rows]


def stopped_ledger(engine: Engine, last_event: int, mark: int) -> Ledger:
    """What is trained where all ranks were stopped: everything before the last event, and what ranks have done since.

    A collective. `mark`: this rank's number of parts at that event.
    """
    own = [slot for slot, _, _ in engine.state.log[mark:]]
    gathered = gather_json(engine.rank_info.group, own)
    known = engine.state.ledger.advanced_to(max(last_event, engine.state.ledger.trained))
    return known.after(slot for data in gathered for slot in data)


NO_RATE = (
    "  the optimizer has no learning rate to scale (lr=None); averaging params over devices damps each one's steps"
)


class LocalScale:
    """`value` is the factor; `update` at the start, until it is known, and after every epoch."""

    def __init__(self, engine: Engine, windows: Windows | RecordedWindows) -> None:
        self._engine, self._windows = engine, windows
        self.value = 1.0
        self.is_known = False

    def update(self) -> list[str]:
        """Follow the speeds; a replay takes the factor from the log. Returns lines to print."""
        if isinstance(self._windows, RecordedWindows):
            self.value = self._windows.scale
            return []
        if not self._windows.is_measured:
            return []
        if not self._engine.schedule.rates:
            lines, self.is_known = [] if self.is_known else [NO_RATE], True
            return lines
        wanted = self._engine.lr_scale("auto", self._windows.speeds)
        if abs(wanted / self.value - 1.0) <= CHANGE and self.is_known:
            return []
        self.is_known, self.value = True, wanted
        self._engine.recorder.event("lr_scale", scale=wanted)
        lr, rule = self._engine.schedule.plain[0], self._engine.config.lr_scale or "auto"
        return [] if wanted == 1.0 else [describe_lr_scale(lr, wanted, rule)]


def describe_lr_scale(lr: float, scale: float, rule: float | str) -> str:
    return (
        f"  learning rate {lr:g} -> {scale * lr:g} (x{scale:.2f}, lr_scale={rule!r}): averaging params "
        "over devices makes steps smaller; lr_scale=1.0 turns this off"
    )
