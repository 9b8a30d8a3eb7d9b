"""Exact data parallelism: all ranks take every step together, on one sum of gradients (policies sync and balanced).

Each rank's statistics (StepStats: its own time, a stop request, a fingerprint of its policy) travel in the last
gradient bucket, so agreeing on shares costs no collective of its own. One rank alone takes the same path without a sum.

Where the run can go on without a rank (train/settle.py), StepGuard keeps what makes the loss of one cost no more than
the step in progress: the part of the step that has begun, and every rank's shares since this generation began, from
which the log of a lost rank is made.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import add
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from uneven.average.buffers import BufferAverage
from uneven.comm.group import Group
from uneven.data.feed import Micros
from uneven.data.tensors import Batch
from uneven.parallel.batchnorm import describe_batchnorm, synced_buffers
from uneven.policy.axis import Part, Slot, part_of
from uneven.policy.calibrating import Calibrating
from uneven.policy.exact import Balanced, ExactPolicy, Fixed
from uneven.policy.finish import Cost
from uneven.policy.ledger import Ledger
from uneven.policy.stream_axis import StreamAxis
from uneven.step.captured import check_capturable
from uneven.step.finite import Fault, OwnCheck, Verdict
from uneven.timeline.record import Recorder
from uneven.train.engine import Engine
from uneven.train.policies import advise, capture_ahead, make_exact_policy
from uneven.train.prepare import apply_strategy
from uneven.train.rank_info import RankInfo
from uneven.train.state import BadStep, count_skipped
from uneven.train.synchronizer import (
    EventCall,
    Inbox,
    RankStatus,
    Stragglers,
    Wish,
    check_agreement,
    check_replicas,
    check_status,
    request_event,
    take_first,
    wished,
)


class StepStats(NamedTuple):
    """What each rank sends to the others with every gradient sum."""

    busy_ms: float  # this rank's own work in the step, without waiting
    is_unrepresentative: float  # 1 where busy_ms is no measure of its speed (a new size, a capture)
    status: float  # RankStatus
    fingerprint: float  # of the policy's state: equal on all ranks
    user_ms: float = 0.0  # code of the user's own since the last step, which is not in busy_ms
    wish: float = 0.0  # Wish


def is_leaving(row: Sequence[float]) -> bool:
    """Whether the rank with these statistics takes no part in the step."""
    return int(StepStats._make(row).status) not in (RankStatus.TRAINING, RankStatus.STOP_REQUESTED)


def record_wait(
    recorder: Recorder, rank: int, busy_ms: Sequence[float], user_ms: Sequence[float], sent_ns: int, summed_ns: int
) -> None:
    """Divide the time between the last two, by what the ranks did: until the last of them came this one waited, and
    the rest was communication.

    What the last rank worked longer is waiting. What it came later still, it spent in code of the user's own
    (an evaluation between epochs, on rank 0 alone): that is the user's time on this rank, too.
    """
    waited_ms = max(map(add, user_ms, busy_ms)) - (user_ms[rank] + busy_ms[rank])
    held_up_ms = max(0.0, waited_ms - (max(busy_ms) - busy_ms[rank]))
    if held_up_ms:
        recorder.enter("user", sent_ns)
        recorder.enter("wait", min(summed_ns, sent_ns + int(held_up_ms * 1e6)))
    recorder.enter("communication", min(summed_ns, sent_ns + int(waited_ms * 1e6)))
    recorder.enter("compute", summed_ns)


class StepTimer:
    """Times a rank's own work in a step: without waiting for others, and without code of the user's own.

    Life cycle: `start` when a collective has ended, or anything that is no training step; `stop` when the rank's
    gradients are complete. Waits in between, as for the statistics of synchronised BatchNorm, are left out.
    """

    def __init__(self, rank_info: RankInfo) -> None:
        self._rank_info = rank_info
        self._started_ns = 0
        self._waited_s = 0.0  # that this rank had waited in collectives until then
        self._user_ns = 0
        self.stopped_ns = 0
        self.busy_ms = 0.0  # between the last `start` and `stop`

    def start(self, now_ns: int) -> None:
        self._started_ns, self._waited_s = now_ns, self._rank_info.group.traffic.wait_s

    def stop(self, now_ns: int) -> None:
        self.stopped_ns, self.busy_ms = now_ns, (now_ns - self.began_ns) / 1e6

    @property
    def began_ns(self) -> int:
        """The start, later by all that was left out since."""
        return self._started_ns + int((self._rank_info.group.traffic.wait_s - self._waited_s) * 1e9)

    def leave_out(self, ns: int) -> None:
        self._started_ns += ns

    def note_user_time(self, ns: int) -> None:
        """Code of the user's own ran for so long."""
        self._user_ns += ns
        self.leave_out(ns)

    def take_user_ms(self) -> float:
        """The time of the user's own code since the last call."""
        user_ms, self._user_ns = self._user_ns / 1e6, 0
        return user_ms


class StepGuard:
    """Life cycle: one per generation; `plan` for every slot, `begin` and `done` around every step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._first = engine.state.trained
        self._plan: list[tuple[int, tuple[int, ...]]] = []  # (from this position on, shares)
        self._dropped: set[int] = set()  # slots of which all ranks dropped their parts
        self._left_out: list[tuple[int, int]] = []  # positions that a loop of the user's own left out
        self._part: Part | None = None  # of the step that has begun
        self._losses: list[tuple[float, float]] = []  # that were known before the step
        self._updates = 0  # of the strategy before the step, where it counts them

    def plan(self, position: int, shares: tuple[int, ...]) -> None:
        """These are the shares of the slot at this position; called in order, maybe ahead of the step."""
        if not self._plan or self._plan[-1][1] != shares:
            self._plan.append((position, shares))

    def begin(self, part: Part) -> None:
        """Before the part's forward. A loop of the user's own runs that itself: then the step begins it once more."""
        if self._part == part:
            return
        self._part, self._updates = part, self._engine.updates
        self._losses = self._engine.meter.known

    def done(self) -> None:
        self._part = None

    def leave_out(self, end: int) -> None:
        """All ranks leave out what follows the last step, up to this position; so the step that has begun, too."""
        self._left_out.append((self._engine.state.trained, end))
        self._part = None

    def note_dropped(self, slots: Iterable[int]) -> None:
        self._dropped.update(slots)

    @property
    def is_applied(self) -> bool:
        """A sharded step is applied before its params are sent: one that was interrupted after that counts."""
        return self._part is not None and self._engine.updates > self._updates

    def end_interrupted(self, was_applied: bool, fault: Fault | None) -> list[BadStep]:
        """The group is lost, perhaps inside a step. `was_applied`: a survivor has been through the step, so it counts,
        or it was skipped for this `fault` and is returned.

        A step that is skipped or done again leaves buffers and loss meter as before it.
        """
        engine = self._engine
        part = self._part
        self._part = None
        if part is None:
            assert not was_applied, "a rank is behind only where it was interrupted"
            return []
        if was_applied and fault is None:
            engine.step.end_update()
        engine.step.cancel()
        if was_applied:
            return engine.state.commit(part, lambda: fault, engine.state.trained + 1, engine.late_verdicts)
        engine.meter.learn(self._losses)
        return []

    def record(self) -> dict[str, Any]:
        """The steps of this generation up to the last one that is applied here, for `log_of` in settle.py; as JSON."""
        engine = self._engine
        return {
            "first": self._first,
            "end": engine.state.trained,
            "plan": [[position, list(shares)] for position, shares in self._plan if position < engine.state.trained],
            "dropped": sorted(self._dropped),
            "left_out": self._left_out,
            "ledger": engine.state.ledger.to_json(),
        }


class GradientSync:
    """Invariant: after every slot all ranks hold the same params, up to how their devices round."""

    is_local: bool = False

    def __init__(self, engine: Engine, inbox: Inbox, before_change: Callable[[], None]) -> None:
        """`before_change` is called before params are changed outside the optimizer's step."""
        self.engine = engine
        self.inbox = inbox
        self.before_change = before_change
        self.wished = Wish.NONE  # by any rank, in the last step
        self.is_stopped = False
        self.notes: list[str] = []
        self.policy: ExactPolicy = Fixed.even(engine.rank_info.world_size)
        self.buffers = BufferAverage(engine.model, synced_buffers(engine.model))
        # With tensor or sequence parallelism every rank trains all samples of a slot.
        self._is_model_parallel = engine.rank_info.world_size > 1 and engine.config.is_model_parallel
        self._is_alone = engine.rank_info.world_size == 1
        self._dummies = DummyBatches(engine, self._is_model_parallel)
        self.busy_ms: Sequence[float] = ()  # every rank's own work in the last step
        self._has_advised = False
        self.lr_scale = 1.0
        self.weight = 0  # samples since the buffers were last averaged
        self._is_skipping = False  # a rank leaves out the rest of the epoch, from the present slot on
        self._timer = StepTimer(engine.rank_info)
        # A step that the policy does not know of yet, with every rank's time for it; 0 means not measured.
        self._unnoted: tuple[Slot, Sequence[float]] | None = None
        self._quiet_until = 0  # no event is due before this slot, unless one is requested
        self.guard: StepGuard | None = None  # where the run can go on without a rank
        self.event_loss: float | None = None  # of the event that is being reached

    @property
    def group(self) -> Group:
        return self.engine.rank_info.group

    def initialize(self, costs: Sequence[Cost]) -> None:
        """Set the first shares from every rank's measured cost, and apply the strategy."""
        engine, config = self.engine, self.engine.config
        if engine.rank_info.world_size == 1:
            self.lr_scale = engine.lr_scale(1.0, [1.0])
            engine.connect_batchnorm(self.group)  # of ranks that are gone, where it was left alone
            return
        if config.compile == "graph":
            check_capturable(engine.batchnorm_sync)
        engine.limit_caps([cost.cap for cost in costs])
        if engine.batchnorm_sync.layers:
            engine.connect_batchnorm(self.group)
            self._dummies.read()
        self.policy = make_exact_policy(engine, costs, self._is_model_parallel)
        first = engine.axis.slot(0).samples
        shares = list(self.policy.shares(0, first))
        self.lr_scale = engine.lr_scale(1.0, shares)
        self._stragglers = Stragglers(engine.recorder, engine.rank_info, shares)
        is_measured = engine.can_warm_up and not config.has_fixed_shares
        alone = [1e3 * config.batch_size / cost.time_ms(config.batch_size) for cost in costs]
        engine.recorder.event("shares", slot=0, shares=shares, alone=alone if is_measured else [])
        if not self._is_model_parallel:
            self.notes = describe_batchnorm(
                engine.model, engine.batchnorm_sync, config.sync_batchnorm, engine.can_warm_up, shares
            )
        if sum(engine.caps) < first:
            held = ", ".join(f"{cap:g}" for cap in engine.caps)
            self.notes.append(f"  memory holds {held} of a step's {first} samples: shares run as micro-batches")
        # Whole speeds, not shares of samples: a slow rank without samples can still do a part of the optimizer's work.
        speeds = alone if is_measured else [float(share) for share in shares]
        num_stats = len(StepStats._fields) + len(OwnCheck._fields)
        self.notes += apply_strategy(engine, self.group, num_stats, speeds, is_leaving)
        engine.step.fix_params()
        self._capture_ahead()
        if is_measured:
            self.notes += advise(engine, costs)

    def state_dict(self) -> dict[str, Any]:
        self._follow_speeds()
        return {"kind": type(self.policy).__name__, "policy": self.policy.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("kind") == type(self.policy).__name__:
            self.policy.load_state_dict(state["policy"])
            self._capture_ahead()

    def _capture_ahead(self) -> None:
        is_moving = isinstance(self.policy, Balanced)
        capture_ahead(self.engine, self.policy.shares, is_moving)

    def ledger(self) -> Ledger:
        return self.engine.state.known_ledger

    def reset_timer(self) -> None:
        self._timer.start(self.engine.recorder.enter("data"))

    def note_user_time(self, ns: int) -> None:
        self._timer.note_user_time(ns)

    def parts(self) -> Iterator[Part]:
        engine, rank_info = self.engine, self.engine.rank_info
        for position, slot in enumerate(engine.state.slots_left(), engine.state.trained):
            if self._is_model_parallel:
                yield Part(slot, slot.first, slot.samples, self.engine.micro_batch_size(slot.samples))
                continue
            shares = self.policy.shares(slot.index, slot.samples)
            if self.guard is not None:
                self.guard.plan(position, shares)
            yield part_of(slot, shares, rank_info.rank, self.engine.micro_batch_size(shares[rank_info.rank]))

    def advance(self, done: int) -> EventCall | None:
        """The event after the last step, if there is one."""
        if self._is_alone:  # now: a callback may have just asked for something
            asked = self.inbox.read()
            self.is_stopped |= asked.is_stopping
            self._follow(asked.wish)
        return self.event_due(done)

    def _follow(self, wish: Wish) -> None:
        """What any rank wants after the last step."""
        trained, self.wished = self.engine.state.trained, wish
        if wish:
            self._quiet_until = 0
            request_event(self.engine.events, trained, wish, trained - 1)

    def begin(self, part: Part) -> None:
        self.engine.begin_slot(part.slot.index, self.lr_scale)
        if self.guard is not None:
            self.guard.begin(part)

    def skip_rest(self) -> None:
        """The status takes the place of the next step's sum: the other ranks then do not update in that step."""
        engine = self.engine
        if engine.rank_info.world_size > 1:
            check_status(self.exchange_status(RankStatus.SKIPS_REST), engine.state.trained)
        self._is_skipping = True

    def follow_skip(self) -> None:
        """A rank has left out the rest of the epoch, in an exchange that was not `step`."""
        self._is_skipping = True

    def event_due(self, done: int) -> EventCall | None:
        """The end of an epoch, or an event at a step inside it."""
        engine, axis = self.engine, self.engine.axis
        if self._is_skipping:
            epoch = self.epoch
            self._is_skipping = False
            if self.guard is not None:
                self.guard.leave_out(axis.epoch_end(epoch))
            engine.state.skip_epoch(epoch)
            return self._call(epoch, None)
        slot = engine.state.trained
        if slot < self._quiet_until:
            return None
        epoch = axis.slot(max(0, slot - 1)).epoch  # in progress: another one than the slot's where a stop left gaps
        is_over = slot == axis.epoch_end(epoch)
        is_event = slot > done and (is_over or engine.events.evaluates(slot) or engine.events.saves(slot))
        if is_event:
            return self._call(epoch, None if is_over else slot)
        if not isinstance(axis, StreamAxis):  # its epochs end where nobody knows beforehand
            self._quiet_until = min(engine.events.next_event(slot), axis.epoch_end(axis.epochs_before(slot)))
        return None

    def _call(self, epoch: int, step: int | None) -> EventCall:
        """With the mean loss since the last entry of the history; a collective, unless ranks had it already."""
        engine = self.engine
        engine.recorder.enter("compute")
        self._follow_speeds()
        engine.run_ahead.drain()
        self.note_bad_steps(engine.state.settle_steps())
        engine.recorder.enter("communication" if engine.rank_info.world_size > 1 else "other")
        if self.event_loss is None:
            has_entry = engine.events.has_entry(engine.state.trained)
            self.event_loss = engine.meter.take(self.group) if has_entry else float("nan")
        return EventCall(epoch, self.event_loss, epoch, engine.state.trained, step)

    def passed(self, is_stopped: bool) -> None:
        self.is_stopped |= is_stopped
        self.event_loss = None
        engine = self.engine
        is_end = engine.axis.ends_epoch(engine.state.trained)
        if is_end and isinstance(self.policy, Balanced) and not is_stopped:
            self.policy.recenter()
            self._capture_ahead()
        self._timer.start(engine.recorder.enter("other"))

    def step(self, part: Part, micros: Micros) -> int | None:
        """One optimizer step of all ranks."""
        engine = self.engine
        micros = engine.open(micros)
        began_ns = engine.recorder.enter("compute")
        self.begin(part)
        if self._is_alone:
            verdict = engine.local_step(part, micros, began_ns)
            engine.after_step(began_ns)
        else:
            if self._dummies.are_needed:
                micros = micros + self._dummies.of(part, self.policy.shares)
            verdict = self._synced_step(part, micros)
        engine.recorder.enter("other")
        if self._is_skipping:
            return None
        # Ranks that train the same samples log them once.
        is_counted = not self._is_model_parallel or engine.rank_info.rank == 0
        counted = part if is_counted else Part(part.slot, part.slot.stop, 0, part.batch)
        bad_steps = engine.state.commit(counted, verdict, engine.state.trained + 1, engine.late_verdicts)
        if self.guard is not None:
            self.guard.done()
        # Only one rank alone learns of a bad step later, and it averages no buffers.
        self.weight += 0 if bad_steps else part.samples
        if bad_steps:
            self.note_bad_steps(bad_steps)
        if self.wished and not self._is_alone:
            self._follow(self.wished)
        return engine.state.trained

    def exchange_status(self, status: RankStatus) -> list[RankStatus]:
        """A gradient sum of zeros in place of the next step's: the other ranks are waiting in that one."""
        engine = self.engine
        samples = engine.axis.slot(min(engine.state.trained, engine.axis.total - 1)).samples
        own = StepStats(0.0, 1.0, float(status), float(self.policy.fingerprint()))
        rows = engine.step.exchange(samples, lambda: own)
        return [RankStatus(int(StepStats._make(row).status)) for row in rows]

    def average_buffers(self) -> None:
        """Make all replicas equal, buffers included; a collective."""
        engine, info = self.engine, self.engine.rank_info
        if info.world_size > 1 and engine.config.is_replicated:
            has_own_rates = self.lr_scale == 1.0 and engine.schedule.is_constant
            check_replicas(self.group, engine.model, engine.optimizer, has_own_rates=has_own_rates)
            if info.has_cuda:
                self.before_change()
                take_first(self.group, engine.model)
        self.buffers.run(self.group, self.weight)
        self.weight = 0

    @property
    def epoch(self) -> int:
        return self.engine.axis.epochs_before(self.engine.state.trained)

    def ratio(self) -> tuple[int, ...]:
        return self.policy.shares(self.engine.state.trained, self.engine.axis.slot(0).samples)

    def progress(self) -> dict[str, float]:
        return {}

    def finalize(self) -> None:
        self.engine.recorder.enter("compute")
        self.engine.run_ahead.drain()
        self.note_bad_steps(self.engine.state.settle_steps())
        self.engine.recorder.enter("communication" if self.engine.rank_info.world_size > 1 else "other")
        self.average_buffers()

    def close(self) -> None:
        self.engine.step.close()

    def expect_losses(self) -> None:
        self.guard = StepGuard(self.engine)

    @property
    def done(self) -> int:
        """Steps that this rank has applied."""
        return self.engine.state.trained

    @property
    def has_handed_in(self) -> bool:
        """What this rank has trained is in sums that the others have, or are about to have."""
        return True

    def abandon(self) -> None:
        """Nothing of a step can be kept without the others: `end_interrupted` decides once they are known."""

    def end_applied(self) -> None:
        """The group is lost: a sharded step that was applied here before its params were sent counts."""
        if self.guard is not None and self.guard.is_applied:
            self.end_interrupted(was_applied=True, fault=None)

    def end_interrupted(self, *, was_applied: bool, fault: Fault | None) -> None:
        """Of those who are left one has been through the step that is interrupted here, or none has: see StepGuard."""
        if self.guard is None:
            return
        known = len(self.engine.state.log)
        bad_steps = self.guard.end_interrupted(was_applied, fault)
        if not bad_steps:
            self.weight += sum(samples for _, _, samples in self.engine.state.log[known:])
        self.note_bad_steps(bad_steps)

    def take_buffers(self, averaged: Tensor) -> None:
        """Of another rank, which has averaged them with this one's."""
        self.buffers.take(averaged)
        self.weight = 0

    def own_cost(self) -> Cost | None:
        """What this rank's steps cost by now; None where it was not measured."""
        return self.policy.current_costs()[self.engine.rank_info.rank] if isinstance(self.policy, Balanced) else None

    def go_on_after(self, before: "GradientSync | None", event_loss: float | None) -> None:
        self.event_loss = event_loss
        if before is not None:
            self.buffers, self.weight = before.buffers, before.weight

    def _synced_step(self, part: Part, micros: Micros) -> Verdict:
        """A step whose gradients are summed over all ranks, with their statistics in the same sum."""
        engine = self.engine
        slot = part.slot
        recorder = self.engine.recorder
        rows, checks = engine.step.forward_backward(micros, slot.samples, lambda: self._stats_of_step(part))
        summed_ns = recorder.clock()
        self._timer.start(summed_ns)
        busy_ms, are_unrepresentative, statuses, fingerprints, user_ms, wishes = zip(*rows, strict=True)  # as StepStats
        rank = engine.rank_info.rank
        record_wait(recorder, rank, busy_ms, user_ms, self._timer.stopped_ns, summed_ns)
        if any(statuses):
            check_status([RankStatus(int(status)) for status in statuses], slot.index)
        fault = None
        if RankStatus.SKIPS_REST in statuses:
            self._is_skipping = True
            engine.step.skip()
        else:  # before anything else: a device is idle until then
            fault = engine.step.update(checks)
        if are_unrepresentative[rank]:
            recorder.event("prepared", phase="step", slot=slot.index, samples=part.samples, ms=self._timer.busy_ms)
        self.busy_ms = busy_ms
        self.wished = wished(wishes) if any(wishes) else Wish.NONE
        if fingerprints.count(fingerprints[0]) < len(fingerprints):
            check_agreement([int(one) for one in fingerprints], f"before slot {slot.index}")
        # Without those that are no measure: else a rank that captures a graph looks slow, its share moves to a size
        # that must be captured in turn, and so on.
        known = [0.0 if is_none else ms for is_none, ms in zip(are_unrepresentative, busy_ms, strict=True)]
        self._unnoted = None if self._is_skipping else (slot, known)
        if not engine.step.is_captured:
            self._follow_speeds()
        self.is_stopped |= RankStatus.STOP_REQUESTED in statuses and not self._is_skipping
        return lambda: fault

    def _stats_of_step(self, part: Part) -> StepStats:
        """What this rank says with the sum of a step; called just before the last bucket is sent."""
        engine = self.engine
        # Before the wait for the device, which computes meanwhile.
        self._follow_speeds()
        asked = self.inbox.read()
        status = RankStatus.STOP_REQUESTED if asked.is_stopping else RankStatus.TRAINING
        fingerprint, user_ms = float(self.policy.fingerprint()), self._timer.take_user_ms()
        is_first = float(engine.was_first_of_its_size(part))
        engine.run_ahead.catch_up()
        engine.simulate_slowdown(self._timer.began_ns)
        self._timer.stop(engine.recorder.enter("wait"))
        return StepStats(self._timer.busy_ms, is_first, float(status), fingerprint, user_ms, float(asked.wish))

    def note_bad_steps(self, bad_steps: Sequence[BadStep]) -> None:
        """Steps that all ranks skipped: say so, and end the run where too many came in a row."""
        if bad_steps:
            self.notes += count_skipped(self.engine.state.dropped, bad_steps, self.engine.config.max_bad_steps)
            if self.guard is not None:
                self.guard.note_dropped([part.slot.index for part, _ in bad_steps])

    def _follow_speeds(self) -> None:
        """Feed the last step's times to the policy, which may move the shares of later slots.

        With captured steps this happens when the next one is on the device: all that lies between two launches leaves
        the device idle. The policy's `lookahead` is one more for it.
        """
        if self._unnoted is None:
            return
        (slot, times), self._unnoted = self._unnoted, None
        move = self.policy.note(slot.index, slot.samples, times)
        if move is not None:
            self.engine.recorder.event("share", slot=move.slot, shares=list(move.shares), gain=move.gain)
            self.notes += self._stragglers.follow(move.slot, move.shares)
        if isinstance(self.policy, Calibrating) and self.policy.costs is not None and not self._has_advised:
            self._has_advised = True
            self.notes += advise(self.engine, self.policy.costs)


class DummyBatches:
    """Micro-batches of 0 samples, for ranks that have fewer of them than others where layers run collectives.

    Synchronised BatchNorm sums over ranks in every forward, and a sharded strategy gathers params: so all ranks run
    equally many micro-batches, and those that have none left run dummies, which count nothing.
    Life cycle: `read` once where BatchNorm is synchronised, then `of` for every part.
    """

    def __init__(self, engine: Engine, is_model_parallel: bool) -> None:
        self._engine = engine
        self._inputs: Any = None
        is_plain = engine.config.is_replicated and not engine.batchnorm_sync.layers
        self.are_needed = not (is_plain or is_model_parallel)

    def read(self) -> None:
        """One sample, to pass through the layers."""
        engine = self._engine
        _, ((self._inputs, _),) = next(engine.feed.stream([Part(engine.axis.slot(0), 0, 1, 1)]))

    def of(self, part: Part, shares_of: Callable[[int, int], Sequence[int]]) -> Micros:
        """What this rank runs after its own micro-batches of a part."""
        engine = self._engine
        shares = shares_of(part.slot.index, part.slot.samples)
        most = max(-(-share // engine.micro_batch_size(share, rank)) for rank, share in enumerate(shares))
        missing = range(most - len(part.sizes))
        # A strategy runs its own collectives without a batch; BatchNorm layers need one to pass through them.
        return [(self._open() if engine.config.is_replicated else None, 0) for _ in missing]

    def _open(self) -> Batch:
        """Without numbers that are not finite: 0 times them would still spoil the gradients of a rank's step."""
        batch = self._engine.feed.open(self._inputs)
        return pytree.tree_map_only(Tensor, lambda t: t.nan_to_num() if t.is_floating_point() else t, batch)
