"""Local SGD: each rank steps by itself and its params are averaged in rounds along the axis (cadence and async).

After every step a rank asks two questions: has the average of the round in flight arrived, and is the next round due?
Cadence waits for the average. Async keeps training and merges after the first step at which the average is there
([Note: merge rule] in average/background.py). Rounds, evaluations and epoch ends lie at slots of the axis, and all
ranks pass them in that order, so nothing else has to be agreed upon.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from uneven.average.background import BackgroundAverage, make_average
from uneven.average.buffers import BufferAverage
from uneven.average.verify import ODD_REPLICA, judge
from uneven.comm.gather import gather_checksums
from uneven.comm.group import Group, SoloGroup
from uneven.data.feed import Micros
from uneven.policy.axis import Part
from uneven.policy.finish import Cost
from uneven.policy.ledger import Ledger
from uneven.policy.lineage import Lineage
from uneven.policy.recorded import RecordedSchedule, RecordedWindows, Round
from uneven.policy.round_report import RoundReport
from uneven.policy.slot_schedule import SlotSchedule
from uneven.policy.stream_end import StreamEnd
from uneven.policy.windows import Windows
from uneven.train.engine import Engine
from uneven.train.local_state import EpochEnds, LocalState, RoundCosts, RoundTally, check_bad_steps, note_dropped
from uneven.train.policies import (
    LocalScale,
    SlotClaims,
    describe_guard,
    leave_out_rest,
    make_slot_schedule,
    note_shares,
    stopped_ledger,
)
from uneven.train.synchronizer import (
    EventCall,
    Inbox,
    Merged,
    RankStatus,
    Stragglers,
    Wish,
    check_agreement,
    check_status,
    follow_wish,
)


class LocalSGD:
    """Invariant: a rank has at most one round in flight and merges round k before it enters round k + 1."""

    is_local: bool = True
    event_loss: float | None = None  # it is with the events that are pending

    def __init__(self, engine: Engine, inbox: Inbox, before_change: Callable[[], None]) -> None:
        """`before_change` is called before params are changed outside the optimizer's step."""
        self.engine = engine
        self.inbox = inbox
        self.before_change = before_change
        self.wished = Wish.NONE
        self.notes: list[str] = []
        self.epochs = EpochEnds(engine)
        self.tally = RoundTally(engine)
        self.buffers = BufferAverage(engine.model)
        self.stream_end = StreamEnd(engine.axis)
        self.is_stopped = False
        self.others_stop = False  # another rank reported a stop request
        self._skips = False  # a rank leaves out the rest of the epoch
        self._begun = 0  # the epoch in which the last step began
        self.costs = RoundCosts(engine.recorder, engine.config.policy == "async")
        self._free_ns = 0  # start of the rank's own work since its last collective
        self.claims = SlotClaims(self.group, engine.recorder)
        self.agreed: LocalState | None = None  # by a settlement, until `initialize` begins from it
        self.average: BackgroundAverage
        self._has_thread = False  # `average` was made here, so `close` ends its thread
        self.is_blank = False  # of a newcomer: it has trained nothing and has not settled yet

    @property
    def group(self) -> Group:
        return self.engine.rank_info.group

    @property
    def epoch(self) -> int:
        return self.epochs.epoch

    def initialize(self, costs: Sequence[Cost]) -> None:
        """Set the first window and the learning-rate scale from every rank's measured cost.

        Called again when ranks have settled. It then begins from what they agreed upon, and `costs` count only for
        newcomers.
        """
        engine, agreed = self.engine, self.agreed
        # A group of its own: an average on its way must not queue before the main thread's collectives.
        self.average = self.new_average(self.group.new_group(), None if agreed is None else self.average)
        self._has_thread = True
        self.windows: Windows | RecordedWindows
        self.slot_schedule: SlotSchedule | RecordedSchedule
        self.windows, self.slot_schedule = make_slot_schedule(engine, self.claims, costs)
        self._mark = len(engine.state.log)  # this rank's parts at the last event
        self.scale = LocalScale(engine, self.windows)
        if agreed is None:
            self.epochs.begin()
        else:
            agreed.start(self.windows, self.scale, self.tally.lineage.members, engine.state.trained)
        self.notes += self.scale.update()
        if not engine.state.rounds:
            engine.state.commit_round(Round(engine.state.trained, self._mark, self._mark, self.scale.value))
        self.notes += note_shares(engine, self.windows.counts, costs, is_start=agreed is None)
        self.agreed = None
        self._stragglers = Stragglers(engine.recorder, engine.rank_info, self.windows.counts)

    def state_dict(self) -> dict[str, Any]:
        return {
            "windows": self.windows.state_dict() if isinstance(self.windows, Windows) else None,
            "lr_scale": [self.scale.value, self.scale.is_known],
            **self.epochs.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not isinstance(self.windows, Windows) or state.get("windows") is None:
            return
        self.windows.load_state_dict(state["windows"])
        self.windows.resume_at(self.engine.state.trained)
        self.scale.restore(*state["lr_scale"])
        self.epochs.load_state_dict(state)

    def ledger(self) -> Ledger:
        """At an event all slots before it are trained; after a stop ranks tell each other theirs since then."""
        if not self.is_stopped:
            return self.engine.state.known_ledger
        return stopped_ledger(self.engine, self.windows.last_event, self._mark)

    def reset_timer(self) -> None:
        self._begin_timing()

    def _begin_timing(self) -> None:
        self._free_ns = self.engine.recorder.enter("data")
        self.claims.take_waited_ns()

    def note_user_time(self, ns: int) -> None:
        self.tally.note_user_time(ns)
        self._free_ns += ns

    def use_segments(self, segment_end: Callable[[int], int]) -> None:
        """Before the first slot: the only events are at `segment_end(slot)`, and epoch ends are not reported.

        For train/segment.py: the first segment begins at slot 0, each further one at the end of the last.
        """
        assert isinstance(self.windows, Windows), "a benchmark replays nothing"
        self.epochs.be_silent()
        self.windows.follow_events(segment_end)

    def parts(self) -> Iterator[Part]:
        axis = self.engine.axis
        last = min(self.engine.state.trained, axis.total - 1)
        while not self._is_ended:
            index = self.slot_schedule.hand()
            real = None if index is None else self.engine.state.slot_at(index)
            slot = None if real is None else self.stream_end.slot(real, self.epoch, self.slot_schedule)
            if slot is None:  # a round is due before the next slot, or a stream ends: an empty part lets `train` run it
                slot = axis.slot(last)
                yield Part(slot, slot.first, 0, 1)
                continue
            last = slot.index
            yield Part(slot, slot.first, slot.samples, self.engine.micro_batch_size(slot.samples))

    def step(self, part: Part, micros: Micros) -> int | None:
        """Train the part, if it has samples; an empty one is there for the rounds that are due."""
        self._begun = self.epoch
        if not part.samples:
            return None
        self.slot_schedule.trained(self._step(part, micros))
        return part.slot.index + 1

    def advance(self, done: int) -> Merged | EventCall | None:
        """Enter and merge the rounds that are due, up to one that was merged, or an event that follows from it."""
        if (call := self.event_due(done)) is not None:
            return call
        while not (self._is_ended or self._stays):
            if self.slot_schedule.in_flight:
                if not self._may_merge():
                    break
                return self.merge()
            if not (self._hurries or self.slot_schedule.is_due()):
                break
            self._enter(self._status)
        self._begin_timing()
        return None

    @property
    def _stays(self) -> bool:
        """A rank far slower than the others may have no slot in the next epoch. In the user's own loop it must not pass
        that epoch inside the iteration of this one; held by tests/api/test_loop.py. One that leaves goes first.
        """
        is_leaving = self.wished and Wish.LEAVE in self.wished
        return bool(is_leaving) or (self.engine.is_own_loop and self.epoch > self._begun)

    def event_due(self, done: int) -> EventCall | None:
        """Events that follow from the last round, and those that a loss has interrupted."""
        del done  # those that are over are not pending
        return self.epochs.due

    def passed(self, is_stopped: bool) -> None:
        self.epochs.pending.pop(0)
        self.is_stopped |= is_stopped

    def begin(self, part: Part) -> None:
        self.engine.begin_slot(part.slot.index, self.scale.value)

    def skip_rest(self) -> None:
        """Rounds follow at once until every rank reports the same; the last of them ends the epoch."""
        self._skips, self._begun = True, self.epoch

    def exchange_status(self, status: RankStatus) -> list[RankStatus]:
        """A round at once, only for the status that travels in it."""
        if self.slot_schedule.in_flight:
            self._receive()
        self._enter(status)
        return [RankStatus(int(row.status)) for row in self._receive()]

    def average_buffers(self) -> None:
        """Float buffers were averaged in the round; integer ones take their maximum, by a collective of their own."""
        self.buffers.all_reduce_max_integers(self.group)

    def ratio(self) -> tuple[int, ...]:
        return self.windows.counts

    def progress(self) -> dict[str, float]:
        return {
            "round": self.windows.rounds,
            "staleness": self.slot_schedule.staleness if self.slot_schedule.in_flight else 0,
            "anchor": self.windows.anchor,
            "delay": self.costs.delay,
        }

    def finalize(self) -> None:
        self.engine.recorder.enter("communication")
        self.engine.run_ahead.drain()
        self.average_buffers()
        self.close()
        if self.engine.config.verify:
            tensors = [*self.engine.model.parameters(), *self.engine.model.buffers()]
            judge(gather_checksums(self.group, tensors), self.group.rank, ODD_REPLICA, can_redo=False)

    def close(self) -> None:
        self.claims.close()
        if self._has_thread:
            self.average.close()

    def new_average(self, group: Group, before: BackgroundAverage | None) -> BackgroundAverage:
        """With the memory of the one before, where there was one."""
        engine, config = self.engine, self.engine.config
        if before is not None:
            return before.in_group(group)
        engine.step.fix_params()
        is_whole, is_nccl = config.optimizer_state == "average", config.backend == "nccl"
        return make_average(engine.model, engine.optimizer, self.buffers, group, is_whole, is_nccl, config.verify)

    def expect_losses(self) -> None:
        if not self.tally.lineage.members:
            self.tally.start()

    @property
    def done(self) -> int:
        """Rounds that this rank has merged, of all generations."""
        return self.tally.lineage.merged

    @property
    def has_handed_in(self) -> bool:
        """Whether all that this rank has trained is in an average that the others have, or are about to have."""
        return self.tally.entered is None and self.tally.parts == len(self.engine.state.log)

    def begin_blank(self) -> None:
        """Of a newcomer: it will settle with ranks that have trained, from nothing."""
        self.is_blank = True
        self.average = self.new_average(SoloGroup(), None)
        self.average.close()

    def abandon(self) -> Merged | None:
        """Nothing that is on its way in the group will arrive: merge the round in flight if its average is here.

        No collective, and none is waited for. Events that follow from that round stay pending. May be called again.
        """
        self.claims.close()
        self.engine.run_ahead.drain()
        self.tally.drop(self.engine.state.settle_steps())
        return self.merge() if self.average.abandon() else None

    def take(self, agreed: LocalState, lineage: Lineage, buffers: Tensor | None) -> None:
        """All ranks go on from what they have `agreed` upon; `buffers` where this one merges the last round late.

        No collective, so that a rank has done so entirely or not at all: [Note: all or nothing] in settle.py.
        """
        state, tally = self.engine.state, self.tally
        if self.is_blank:
            assert buffers is not None, "a newcomer is behind"
            self.average.roll_forward(buffers, is_unchanged=True)
            self.is_blank = False
        elif buffers is not None:
            assert tally.entered is not None, "a rank is behind by the round that it has in flight"
            self.before_change()
            self.average.roll_forward(buffers, is_unchanged=self.slot_schedule.staleness == 0)
            state.commit_round(Round(self.windows.due, tally.entered.parts, len(state.log), self.scale.value))
            tally.commit()
        tally.go_on_in(lineage)
        self.buffers.doubt_integers()
        self.agreed = agreed
        self.others_stop, self.is_stopped = agreed.is_stopping, False
        self.stream_end.passed()
        self.epochs.take(agreed)

    def hand_over(self) -> None:
        """One rank is left alone: it needs no round for the events that are due, and keeps all losses in its meter."""
        passed = self.windows.last_event if self.agreed is None else self.agreed.passed
        self.engine.meter.restore(self.epochs.end_alone(passed))

    def own_cost(self) -> Cost | None:
        rank, slot_size = self.engine.rank_info.rank, self.engine.axis.slot_size
        return Cost(0.0, self.windows.slot_time_ms(rank) / slot_size, self.engine.caps[rank])

    def go_on_after(self, before: "LocalSGD | None", event_loss: float | None) -> None:
        del event_loss
        if before is not None:
            self.average = before.average
            self.buffers = before.buffers
            self.tally = before.tally
            self.agreed = before.agreed
            self.epochs = before.epochs
            self.others_stop = before.others_stop

    @property
    def _is_ended(self) -> bool:
        return self.is_stopped or self.slot_schedule.is_over

    @property
    def _stops(self) -> bool:
        """This rank cannot go on, or any was asked to stop: rounds follow at once until every rank knows."""
        return self._has_failed or self.others_stop or self.inbox.read().is_stopping

    @property
    def _hurries(self) -> bool:
        """Rounds follow at once. A rank that leaves trains nothing after the round that it hands its work in with."""
        if self._has_failed or self.others_stop or self._skips:
            return True
        asked = self.inbox.read()
        return asked.is_stopping or (bool(asked.wish) and Wish.LEAVE in asked.wish)

    @property
    def _has_failed(self) -> bool:
        return self.engine.state.dropped.in_a_row >= self.engine.config.max_bad_steps

    @property
    def _status(self) -> RankStatus:
        if self._has_failed:
            return RankStatus.NOT_FINITE
        going = RankStatus.SKIPS_REST if self._skips else RankStatus.TRAINING
        return RankStatus.STOP_REQUESTED if self._stops else going

    def _may_merge(self) -> bool:
        must = self._hurries or self.windows.is_blocking
        return must or self.slot_schedule.may_merge(self.average.is_done())

    def _step(self, part: Part, micros: Micros) -> float:
        """One step of this rank by itself; returns its time in ms."""
        engine = self.engine
        micros = engine.open(micros)
        began_ns = engine.recorder.enter("compute")
        engine.begin_slot(part.slot.index, self.scale.value)
        self._free_ns += self.claims.take_waited_ns()  # waiting for a claim is not this rank's own work
        verdict = engine.local_step(part, micros, self._free_ns)
        engine.after_step(began_ns)
        now_ns = engine.recorder.enter("other")
        position = max(engine.state.trained, part.slot.index + 1)
        bad_steps = engine.state.commit(part, verdict, position, engine.late_verdicts)
        step_ms = (now_ns - self._free_ns) / 1e6
        self.tally.add(part.samples, step_ms)
        if bad_steps:
            self.tally.drop(bad_steps)
        return step_ms

    def _enter(self, status: RankStatus) -> None:
        """Enter the next round: take the snapshot and send it, with this rank's statistics."""
        engine = self.engine
        recorder = self.engine.recorder
        tally = self.tally
        if status or self.windows.is_blocking:
            self.slot_schedule.await_claim()
        asked_ns = recorder.enter("compute")
        if status or self.windows.is_blocking or engine.step.answers_late:
            engine.run_ahead.drain()  # enqueued steps are this rank's own work, not waiting
        # The weight must not depend on which captured steps happen to be known, or a replay would differ.
        tally.drop(engine.state.settle_steps())
        if self._has_failed and status < RankStatus.LEFT_EPOCH:
            status = RankStatus.NOT_FINITE
        began_ns = recorder.enter("communication")
        tally.add(0, (began_ns - asked_ns) / 1e6)
        entered = tally.enter()
        known = self.costs.report._replace(
            **self.slot_schedule.hand_back(),
            next_slot=float(self.slot_schedule.next_slot),
            samples=float(entered.samples),
            dropped=float(entered.dropped),
            **engine.state.dropped.last_fields,
            busy_ms=entered.busy_ms,
            status=float(status),
            fingerprint=float(self.windows.fingerprint()),
            user_ms=entered.user_ns / 1e6,
            end_samples=float(self.stream_end.samples),
            wish=float(self.inbox.read().wish),
            limit=float(self.slot_schedule.set_limit()),
        )
        write_down = tally.writer(self.windows.due, self.scale.value)

        def row() -> RoundReport:
            """By the averaging thread, before anything is sent."""
            write_down()
            return entered.with_losses(known)

        self.average.start(entered.weight, row)
        self.slot_schedule.enter()
        self._entered = self.slot_schedule.parts
        self.costs.entered(began_ns)

    def _receive(self) -> list[RoundReport]:
        """Wait for the average if it is not there yet, and merge it; returns every rank's statistics."""
        recorder = self.engine.recorder
        self.before_change()
        began_ns = recorder.enter("wait")
        self.average.wait()
        here_ns = recorder.clock()
        arrived = self.average.finish(is_unchanged=self.slot_schedule.staleness == 0)
        self.tally.commit()
        rows = [RoundReport._make(row) for row in arrived.rows]
        user_ms = max(row.user_ms for row in rows) - rows[self.engine.rank_info.rank].user_ms
        self.costs.record_wait(began_ns, min(here_ns, max(began_ns, arrived.joined_ns)), user_ms)
        sent = self.average.traffic.payload_bytes
        slowest = min(filter(None, self.windows.speeds), default=0.0)  # of those that take part
        self.costs.received(arrived, began_ns, here_ns, user_ms, slowest, sent)
        self.notes += note_dropped(self.engine.state.dropped, rows, self.engine.axis.slot_size)
        return rows

    def merge(self) -> Merged:
        """Merge the average and do what follows from it, but for events, which need all ranks: they are pending."""
        due, anchor = self.windows.due, self.windows.anchor
        rows = self._receive()
        statuses = [RankStatus(int(row.status)) for row in rows]
        check_status(statuses, due)
        check_bad_steps(rows, self.engine.config.max_bad_steps)
        self.epochs.learn(rows)
        is_skipped = set(statuses) == {RankStatus.SKIPS_REST}
        self._skips = not is_skipped and (self._skips or RankStatus.SKIPS_REST in statuses)
        check_agreement([int(row.fingerprint) for row in rows], f"in the round at slot {due}")
        self.stream_end.learn(rows, self.epoch)
        passed = self.windows.last_event
        if is_skipped:
            due, rows = leave_out_rest(self.engine, self.slot_schedule, self.epoch, self.epochs.samples, rows)
        self.wished = follow_wish(self.engine.events, self.windows, rows)
        decisions = self.windows.note(rows)
        staleness = self.slot_schedule.staleness
        self.slot_schedule.merged()
        recorder, samples = self.engine.recorder, [int(row.samples - row.dropped) for row in rows]
        fields = {"round": self.windows.rounds, "due": due, "steps_late": staleness, "samples": samples}
        recorder.event("round", **fields, **self.costs.fields())
        for decision in decisions:
            recorder.event(decision.kind, slot=due, **decision.fields)
            if decision.kind == "guard":
                self.notes.append(describe_guard(decision.fields, anchor))
        self.notes += self._stragglers.follow(due, self.windows.counts)
        self.others_stop = self.others_stop or RankStatus.STOP_REQUESTED in statuses
        self.is_stopped = set(statuses) == {RankStatus.STOP_REQUESTED}
        if not self.scale.is_known:
            self.notes += self.scale.update()
        event = self.windows.last_event
        is_event = event != passed
        if is_event:
            self.engine.state.reach_slot(event)
            self._mark = len(self.engine.state.log)
        if isinstance(self.windows, RecordedWindows) and self.windows.was_stopped:
            self.average_buffers()  # as where a stopped run is saved
        before = self.epoch
        self.epochs.note(rows, event if is_event else None)
        if self.epoch > before:
            self.stream_end.passed()
            self.notes += self.scale.update()
        self.engine.state.commit_round(Round(due, self._entered, self.slot_schedule.parts, self.scale.value))
        self.engine.recorder.enter("other")
        return Merged(event if is_event else due)
