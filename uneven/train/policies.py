"""What the policy of a run is made of: shares or windows, advice by measured costs, the global batch, captured steps.

An exact policy is as a log has it, as the user gave it, even, or by speed. GradientSync calls all of it but
`choose_global_batch`, which the worker calls on all ranks before the first shares are set: all compute the same from
the same numbers, and the number replaces "auto" in the run's settings. So it is in its state, log and checkpoints, and
a run that is resumed or replayed keeps it (launch/checks/resume.py, launch/checks/preflight.py).

A local policy has windows and a slot schedule, by measured speeds or as a log has them, and a factor on its learning
rates that follows those speeds (policy/scale.py). LocalSGD calls it.

Captured steps are captured before training needs them, on all ranks at the same time: once the first shares are known,
and at the end of every epoch. In the middle of training a capture makes all other ranks wait. So the sizes around the
split are captured, too, and shares do not move farther than that within an epoch (`Balanced.reach`).

Slots of `async` are claimed (SlotClaims): waited for on the training thread, or by a thread of its own.
policy/claims.py decides which; here are the thread, the clock and the timeline. A claim is a round trip to the
rendezvous store, and Group.claim has a connection of its own, so that neither thread waits for the other's requests.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from uneven.comm.gather import gather_json
from uneven.config import SHARDED, RunConfig
from uneven.data.replay import read_log
from uneven.parallel.batchnorm import has_batchnorm
from uneven.policy.axis import Part
from uneven.policy.calibrating import Calibrating
from uneven.policy.claims import MEMORY, typical_ms
from uneven.policy.exact import Balanced, ExactPolicy, Fixed
from uneven.policy.finish import Cost
from uneven.policy.global_batch import SUM_SHARE, choose_factor, step_ms
from uneven.policy.ledger import Ledger
from uneven.policy.recorded import RecordedSchedule, RecordedWindows
from uneven.policy.round_report import RoundReport
from uneven.policy.scale import CHANGE
from uneven.policy.slot_schedule import SlotSchedule
from uneven.policy.stream_axis import StreamAxis
from uneven.policy.subset import advice, forecast, forecast_local
from uneven.policy.windows import LocalSGDConfig, Windows
from uneven.step.captured import GRID
from uneven.step.measure import measure_sum_ms
from uneven.step.no_trace import no_trace
from uneven.timeline.record import Recorder
from uneven.train.engine import Engine

CLOSE_S = 1.0  # how long `close` waits for a claim on its way; a store that does not answer must not hold up the end


@dataclass
class _Claim:
    """A claim on its way; once `done` is set, its reply."""

    count: int
    done: threading.Event = field(default_factory=threading.Event)
    first: int = 0
    error: BaseException | None = None


class ClaimSource(Protocol):
    """A Group, as far as claims need it."""

    def claim(self, count: int) -> int: ...


class SlotClaims:
    """Life cycle: `claim`, or `ask` and then `take`, in any order; `close` once nothing more is claimed.

    The thread starts with the first `ask`: ranks near the store have none. Invariant: at most one claim is on its way,
    so the numbers that this rank gets only grow. Time that the training thread waits for a claim is `communication` on
    the timeline, and `take_waited_ns` returns it, because it is no work of this rank's.
    """

    def __init__(self, source: ClaimSource, recorder: Recorder) -> None:
        self._source = source
        self._recorder = recorder
        self._waited_ns = 0
        self._trips_ms: deque[float] = deque(maxlen=MEMORY)
        self._trip_ms = 0.0  # typical of them
        self._is_connected = False
        self._on_its_way: _Claim | None = None
        self._queue: queue.SimpleQueue[_Claim | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def trip_ms(self) -> float:
        return self._trip_ms

    def claim(self, count: int) -> int:
        """Claim so many slots now and wait for the reply: the first of their numbers."""
        assert self._on_its_way is None, "a claim on its way is taken first"
        return self._wait_for(lambda: self._make(count))

    def ask(self, count: int) -> None:
        assert self._on_its_way is None, "one claim on its way"
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="uneven-claims", daemon=True)
            self._thread.start()
        self._on_its_way = _Claim(count)
        self._queue.put(self._on_its_way)

    def is_there(self) -> bool:
        return self._on_its_way is not None and self._on_its_way.done.is_set()

    def take(self) -> int:
        """The reply to the claim on its way. Raises what its thread raised, such as the loss of the store."""
        claim = self._on_its_way
        assert claim is not None, "nothing was asked for"
        if not claim.done.is_set():
            self._wait_for(claim.done.wait)
        self._on_its_way = None
        if claim.error is not None:
            raise claim.error
        return claim.first

    def take_waited_ns(self) -> int:
        """How long the training thread has waited for claims since the last call."""
        waited_ns, self._waited_ns = self._waited_ns, 0
        return waited_ns

    def close(self) -> None:
        """End the thread; a claim on its way is waited for, but not for long. May be called twice."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(CLOSE_S)

    def _wait_for(self, reply: Callable[[], int]) -> int:
        recorder = self._recorder
        before = recorder.state
        began_ns = recorder.enter("communication")
        try:
            return reply()
        finally:
            self._waited_ns += recorder.enter(before) - began_ns

    def _run(self) -> None:
        while (claim := self._queue.get()) is not None:
            try:
                claim.first = self._make(claim.count)
            except BaseException as error:  # raised by `take`, in the training thread
                claim.error = error
            claim.done.set()

    def _make(self, count: int) -> int:
        """The claim itself, timed on whichever thread makes it."""
        began_ns = self._recorder.clock()
        first = self._source.claim(count)
        if self._is_connected:  # the first claim connects
            self._trips_ms.append((self._recorder.clock() - began_ns) / 1e6)
            self._trip_ms = typical_ms(tuple(self._trips_ms))
        self._is_connected = True
        return first


def make_exact_policy(engine: Engine, costs: Sequence[Cost], is_model_parallel: bool) -> ExactPolicy:
    """`costs`: every rank's; the result must depend on nothing that ranks do not know alike."""
    config = engine.config
    if config.replay is not None:
        info = engine.rank_info
        log = read_log(
            config.replay, engine.axis, info.world_size, config.to_json(), False, machines=info.roster.machines
        )
        return log.shares(engine.axis.total)
    if config.shares is not None:
        return Fixed(config.shares)
    if config.policy == "sync" or is_model_parallel:
        return Fixed.even(engine.rank_info.world_size)
    least = 2 if has_batchnorm(engine.model) and not engine.batchnorm_sync.layers else 1
    samples, lookahead = engine.axis.slot(0).samples, engine.feed.lookahead
    caps = tuple(int(min(cap * config.accumulate, samples)) for cap in engine.caps)
    if not engine.can_warm_up:
        first = engine.state.trained + 1  # the slot before it compiles and allocates
        return Calibrating(engine.rank_info.world_size, samples, first, least, lookahead, caps)
    # In a slot smaller than this a grid would leave ranks without samples. The same on all ranks.
    is_on_grid = config.compile == "graph" and samples >= GRID * engine.rank_info.world_size
    grid, reach = (GRID, REACH) if is_on_grid else (1, None)
    # Captured steps tell the policy of their times one step later (`GradientSync._follow_speeds`).
    lookahead += config.compile == "graph"
    return Balanced(tuple(costs), samples, caps, least, lookahead, grid, reach=reach)


def advise(engine: Engine, costs: Sequence[Cost]) -> list[str]:
    """A line where fewer devices would be faster; a collective, so all ranks call it after the same slot."""
    if engine.config.strategy in SHARDED:
        return []  # devices that hold shards are needed for their memory, whatever their speed
    info = engine.rank_info
    found = forecast(costs, engine.axis.slot(0).samples, measure_sum_ms(info.group, engine.model))
    return advice(found, [str(device) for device in info.devices])


DEFAULT_FACTOR = 4  # times the samples of a plain step, where max_global_batch_size was not given


def choose_global_batch(engine: Engine, costs: Sequence[Cost]) -> list[str]:
    """Replace "auto" by a number in the engine's settings; a collective. Returns the line that tells it, if any."""
    config, info = engine.config, engine.rank_info
    if config.global_batch_size != "auto":
        return []
    base = config.slot_size(info.world_size)
    limit = config.max_global_batch_size or DEFAULT_FACTOR * base
    factor, lines = 1, []
    if info.world_size > 1:
        compute_ms, sum_ms = step_ms(costs, base, engine.least), measure_sum_ms(info.group, engine.model)
        factor = choose_factor(compute_ms, sum_ms, min(limit, engine.axis.samples) // base)
        part = sum_ms / (factor * compute_ms + sum_ms)
        why = f"a gradient sum takes ~{sum_ms:.1f} ms, the compute of {base} samples ~{compute_ms:.1f} ms"
        many = f"{base}" if factor == 1 else f"{factor} x {base}"
        at_limit = "" if part <= SUM_SHARE + 1e-6 else f"; max_global_batch_size={limit} allows no more"
        lines = [f"  global batch {factor * base} ({many}): {why}; sums are ~{part:.0%} of a step{at_limit}"]
        engine.recorder.event("global batch", samples=factor * base, sum_ms=sum_ms, compute_ms=compute_ms)
    accumulate, samples = config.accumulate * factor, base * factor
    engine.settle_axis(replace(config, global_batch_size=samples, accumulate=accumulate, max_global_batch_size=None))
    return lines


AHEAD = 3  # grid steps to either side of the present share
REACH = (AHEAD - 1) * GRID  # samples: rounding to the grid may take a share one step farther

Shares = Callable[[int, int], Sequence[int]]  # (slot, its samples) -> every rank's


def capture_ahead(engine: Engine, shares: Shares, is_moving: bool) -> None:
    """`is_moving`: the policy may move the shares. Each rank for itself."""
    step = engine.step
    if not step.is_captured or engine.rank_info.world_size == 1:
        return
    rank, axis = engine.rank_info.rank, engine.axis
    full, last = axis.slot(0), axis.slot(axis.slots_per_epoch - 1)
    own = shares(engine.state.trained, full.samples)[rank]
    sizes = {full.samples: around(own, full.samples) if is_moving else [own]}
    sizes.setdefault(last.samples, [shares(engine.state.trained, last.samples)[rank]])
    parts = [(_part(engine, samples), slot_samples) for slot_samples, wanted in sizes.items() for samples in wanted]
    missing = [(part, slot_samples) for part, slot_samples in parts if not step.is_prepared(part.sizes, slot_samples)]
    if not missing:
        return
    state = engine.recorder.state
    engine.recorder.enter("compile")
    with no_trace(step, engine.device, keep_optimizer_tensors=True):
        streamed = engine.feed.stream([part for part, _ in missing])
        for (_, micros), (_, slot_samples) in zip(streamed, missing, strict=True):
            step.prepare(micros, slot_samples)
    engine.run_ahead.drain()
    engine.recorder.enter(state)


def _part(engine: Engine, samples: int) -> Part:
    return Part(engine.axis.slot(0), 0, samples, engine.micro_batch_size(samples))


def around(share: int, most: int) -> list[int]:
    """The share and those a few grid steps smaller and larger; the nearest ones last, so that they are kept longest."""
    steps = [sign * step * GRID for step in range(AHEAD, 0, -1) for sign in (1, -1)]
    return [*(share + step for step in steps if 0 < share + step <= most), share]


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
    is_claiming = config.policy == "async"
    return windows, SlotSchedule(
        windows,
        rank,
        axis.total,
        claims.claim if is_claiming else None,
        config.max_staleness,
        ahead=claims if is_claiming else None,
        lookahead=engine.feed.lookahead,
        parts=len(engine.state.log),
    )


def _make_recorded_schedule(engine: Engine) -> tuple[RecordedWindows, RecordedSchedule]:
    """What this rank trains in a replay, and when it enters and merges rounds."""
    config = engine.config
    axis = engine.axis
    info = engine.rank_info
    assert config.replay is not None, "of a replay only"
    log = read_log(config.replay, axis, info.world_size, config.to_json(), True, machines=info.roster.machines)
    speeds = [float(len(parts)) for parts in log.parts]
    rounds, next_event = log.rounds[info.rank], engine.events.next_event
    windows = RecordedWindows(rounds, info.world_size, next_event, speeds, stop_rounds=log.stop_rounds)
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

    def restore(self, value: float, is_known: bool) -> None:
        """As it was in a checkpoint, or on another rank."""
        self.value, self.is_known = value, is_known

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
