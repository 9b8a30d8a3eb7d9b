"""How a rank goes on when another one is lost: wait for the next generation, form its group, settle, train on.

Made by the worker once its first group has formed, where the run can go on without a rank. A loss while it settles
begins the same again with the generation after that.

A rank that leaves on purpose hands in what it has trained, and is not in the next generation. It says so with its next
exchange (Wish.LEAVE): the sum of a step or, in a local policy, a round that carries all it has trained since the last
one. So all ranks know after the same step or round, and part there (`Settler.between_steps`): nobody is in the middle
of a sum, the leaver has nothing that the others have not got, and nothing is trained again. The leader publishes the
generation without it once it has said that all is handed in.

Each rank also writes down what its device did so far (LaneRecords) in the launcher's store: there it outlives the rank,
and so does its lane of the timeline, which is made at the run's end of what ranks have recorded. A part is written
every second, and every thousandth of the run once that is longer: a week is some 7,000 parts. The first MOST_SPANS
spans are written one by one, then the sums of every second by state. Whoever is rank 0 at the end adds the lanes of
those who are gone (launch/training.py).
"""

import json
import zlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from uneven.comm.gather import broadcast_json
from uneven.comm.store import Store
from uneven.errors import GroupLostError, RankError
from uneven.parallel.survivors import CanSurvive
from uneven.policy.finish import Cost
from uneven.timeline.record import STATES, Span, account_of, device_spans
from uneven.timeline.timeline import Lane, Timeline
from uneven.train.engine import Engine
from uneven.train.gradient_sync import GradientSync
from uneven.train.local_sgd import LocalSGD
from uneven.train.rank_info import PARTING, Generation, Membership, RoundRecords
from uneven.train.run_events import RunEvents
from uneven.train.saved_state import Found, read_newest
from uneven.train.saves import Saves, Survival
from uneven.train.settle import (
    NEWCOMER,
    Settlement,
    Standing,
    compare,
    config_of,
    describe,
    end_between_updates,
    exchange_losses,
    lost_logs,
    needs_checkpoint,
    no_checkpoint,
    scaler_state,
    settle_buffers,
    settle_exact,
    settle_local,
    settled_losses,
    share_kept,
    take_losses,
    take_replica,
    why_not,
    why_not_joined,
)
from uneven.train.synchronizer import Synchronizer, Wish

COLLECT_NS = 1_000_000_000
WRITE_EVERY = 1_000  # parts of the run so far
MOST_SPANS = 10_000
MOST_EVENTS = 5_000


class LaneRecords:
    """Life cycle: made with the settler, `tell` between steps, `leave` where this rank goes; `read` at the run's end.

    Used by the thread that trains alone.
    """

    def __init__(self, store: Store, engine: Engine) -> None:
        self._store = store
        self._engine = engine
        self._member = engine.rank_info.member
        # With a local policy the log of a rank that is gone has what it had trained before the run was resumed, too.
        self._restored = sum(samples for _, _, samples in engine.state.log) if engine.config.is_local else 0
        self._states = self._events = self._spans = self._parts = 0  # that are written, or wait for it
        self._waiting: list[Span] = []
        self._unsure: list[Span] = []  # of a CUDA device: it is not known yet whether it was busy
        self._began_ns = engine.recorder.clock()
        self._collect_ns = self._write_ns = self._began_ns

    def tell(self) -> None:
        """Write what is new, where it is time; called between steps."""
        now_ns = self._engine.recorder.clock()
        if now_ns >= self._collect_ns:
            self._collect_ns = now_ns + COLLECT_NS
            self._collect()
            if now_ns >= self._write_ns:
                self._write_ns = now_ns + max(COLLECT_NS, (now_ns - self._began_ns) // WRITE_EVERY)
                self._write(has_left=False)

    def leave(self) -> None:
        """All that this rank has trained is with the others, and it is about to go."""
        self._collect(is_last=True)
        self._write(has_left=True)

    def read(self, members: Sequence[str]) -> list[dict[str, Any]]:
        """What these members, who are gone, have written; without those who had not begun. As JSON."""
        return [found for member in members if (found := self._read(member)) is not None]

    def _collect(self, *, is_last: bool = False) -> None:
        spans, self._states = self._engine.recorder.closed_spans(self._states)
        if self._engine.device.type == "cuda":
            spans = self._as_of_device([*self._unsure, *spans], is_last=is_last)
        self._spans += len(spans)
        self._waiting += spans if self._spans <= MOST_SPANS else _sums(spans)

    def _as_of_device(self, spans: list[Span], *, is_last: bool) -> list[Span]:
        """Up to the end of the last step that the device is known to have finished."""
        busy = self._engine.run_ahead.busy
        known_ns = busy[-1][1] if busy else spans[-1][2] if spans else 0
        sure = [span for span in spans if is_last or span[2] <= known_ns]
        self._unsure = spans[len(sure) :]
        first = max(0, bisect_left(busy, (sure[0][1], 0)) - 1) if sure else 0
        return device_spans(sure, busy[first:])

    def _write(self, *, has_left: bool) -> None:
        engine = self._engine
        info = self._engine.rank_info
        spans = self._waiting
        events = engine.recorder.events_since(self._events)[: MOST_EVENTS - self._events]
        self._waiting, self._events = [], self._events + len(events)
        lane = Lane(info.rank, str(info.device), spans, info.machine.number)
        part = {
            "timeline": Timeline([lane], [], events, [], (info.machine,)).to_json() if spans else None,
            "trained": engine.state.samples,
            "restored": self._restored,
            "has_left": has_left,
        }
        packed: Any = zlib.compress(json.dumps(part).encode())  # bytes are taken as they are; the stub knows only str
        self._store.set(_key(self._parts, self._member), packed)
        self._parts += 1

    def _read(self, member: str) -> dict[str, Any] | None:
        parts: list[dict[str, Any]] = []
        while self._store.check([_key(len(parts), member)]):
            parts.append(json.loads(zlib.decompress(self._store.get(_key(len(parts), member)))))
        timelines = [Timeline.from_json(part["timeline"]) for part in parts if part["timeline"] is not None]
        if not timelines:
            return None
        (lane,) = timelines[-1].lanes
        lane = replace(lane, spans=[span for timeline in timelines for span in timeline.lanes[0].spans])
        events = [event for timeline in timelines for event in timeline.events]
        whole = Timeline([lane], [account_of(lane.rank, lane.spans)], events, [], timelines[-1].machines)
        return {**parts[-1], "member": member, "timeline": whole.to_json()}


def _sums(spans: Sequence[Span]) -> list[Span]:
    """The same time, state by state."""
    if not spans:
        return []
    at, found = spans[0][1], []
    totals: dict[str, int] = dict.fromkeys(STATES, 0)
    for state, first, last in spans:
        totals[state] += last - first
    for state, ns in totals.items():
        if ns:
            found.append((state, at, at + ns))
            at += ns
    return found


def _key(number: int, member: str) -> str:
    return f"lanes/{number}/{member}"


class Rank(Protocol):
    """The worker, as far as settling needs it."""

    engine: Engine
    events: RunEvents
    saves: Saves

    def expect_losses(self, survival: Survival) -> None:
        """From now on the loss of a rank may interrupt an event, or a checkpoint."""
        ...

    def new_synchronizer(self) -> Synchronizer: ...

    def go_on_after(self, before: Synchronizer | None, cost: Cost | None, event_loss: float | None) -> None:
        """Train on in a new group, with a synchronizer that takes over from `before`, if there was one."""
        ...


class Settler:
    """Life cycle: `check` between steps, `settle` where a GroupLostError was raised; until the run's result is there.

    `members`: of the generation in which the run began, in rank order; none for a newcomer, which begins with `join`.
    """

    def __init__(self, rank: Rank, membership: Membership, members: Sequence[str]) -> None:
        engine = rank.engine
        self._rank = rank
        self._engine = engine
        self._events = rank.events
        self._saves = rank.saves
        self._membership = membership
        self._members = tuple(members)
        self._settled = engine.rank_info.generation
        self._lanes = LaneRecords(membership.record_store(), engine)
        self.is_over = False  # nothing is left to train: only results are exchanged
        self._before: Synchronizer | None = None  # of the group that is lost; a newcomer has none
        self._lines: list[str] = []  # for the user, where all went back to a checkpoint
        self._again = 0  # samples that are trained again in this generation, at most, where it is known
        self._is_settling = False  # a group was lost, and this rank trains in no other yet
        self.can_go_on = True  # the leader has announced a generation with this rank
        self._tried = self._settled  # the generation that this rank has tried to train in last
        self._cost: Cost | None = None
        self._began_ns = 0
        rank.expect_losses(self)
        if engine.config.is_local:
            engine.rank_info.keep_records(RoundRecords(membership.record_store(), engine.rank_info.member))

    def begin(self) -> None:
        """With the first group: tell those who may join later what they must know beforehand; a collective."""
        config, info = self._engine.config, self._engine.rank_info
        if not config.is_local:
            exchange_losses(self._engine.meter, info.group)
        self.defer_joins()
        self._engine.state.name_members(self._members)
        self._lanes.tell()
        if info.rank == 0 and why_not_joined(self._engine) is None:
            exact = {"global_batch_size": self._engine.axis.slot_size, "max_global_batch_size": None}
            self._membership.begin({"config": {**({} if config.is_local else exact), "accumulate": config.accumulate}})

    def show(self) -> dict[str, Any]:
        """For the launcher: that the run can go on without ranks, and whether others may join; from any thread."""
        config = self._engine.config
        if config.replay is not None:
            return {"ends_because": "it is a replay"}
        allowed: dict[str, Any] = {"min_ranks": config.min_ranks, "restarts": config.restarts}
        if self._engine.is_own_loop:
            allowed["stays_because"] = "it is a loop of your own"
        return {
            **allowed,
            "admits": why_not_joined(self._engine) is None and not self.is_over,
            **self._show_checkpoint(),
        }

    def _show_checkpoint(self) -> dict[str, Any]:
        """Where a loss means going back: how far, as ranks on the first machine see it, or that it ends the run."""
        info = self._engine.rank_info
        if not needs_checkpoint(self._engine) or not info.is_with_first or self.is_over:
            return {}
        slot = self._saves.newest()
        return {"ends_because": no_checkpoint(self._engine)} if slot is None else {"checkpoint": slot}

    def check(self) -> None:
        """GroupLostError where a newer generation was announced: a rank may train on for long without the others."""
        self._lanes.tell()
        if self._membership.is_stale(self._engine.rank_info.generation):
            raise GroupLostError("a newer generation of ranks was announced")

    def between_steps(self) -> None:
        """GroupLostError where a newer generation was announced, or all ranks have heard that one of them leaves."""
        self.check()
        synchronizer = self._events.synchronizer
        if synchronizer is not None and is_parting(synchronizer, self._engine):
            self._saves.finish()  # its part of the last checkpoint
            raise GroupLostError(PARTING)

    def reach_end(self) -> None:
        """Nothing is left to train on any rank; a collective.

        What the run returns is gathered while everybody is here: a rank that is lost from now on is not missed, though
        nobody has a copy of its shards.
        """
        engine = self._engine
        if isinstance(engine.strategy, CanSurvive) and engine.full_state is not None:
            engine.keep_whole(engine.full_state())
        self.is_over = True
        engine.rank_info.group.all_reduce(torch.zeros(1)).wait()  # all have come as far: none needs the others' params

    def finish(self) -> None:
        """Wait until all ranks have the run's result."""
        self._membership.finish(self._engine.rank_info.generation)

    def read_gone(self) -> list[dict[str, Any]]:
        """The lanes of those who were in the run and are not any more; nothing where the launcher is gone, too."""
        segments = self._engine.state.segments
        known = dict.fromkeys(member for segment in segments for member in segment.get("members", ()))
        try:
            return self._lanes.read([member for member in known if member not in self._members])
        except RuntimeError:
            return []

    def settle(self, lost: GroupLostError) -> None:
        """Go on with whoever is left in a newer generation; raises where the run cannot, with the words of `lost`.

        GroupLostError where another rank is lost meanwhile: call it again with that.
        """
        hands_in = not self._is_settling and self._give_up_group()
        self.can_go_on = False  # until the leader says that there is another generation with this rank
        if hands_in and self._membership.must_leave():
            self._lanes.leave()
            generation = self._membership.leave(self._tried, self._engine.state.samples)
        else:
            generation = self._membership.await_next(self._tried, str(lost))
        self.can_go_on = True
        self._enter_as(generation)

    def join(self, cost: Cost) -> None:
        """Of a newcomer that is ready: take part in the first generation that has it, and train on in it."""
        self.can_go_on = False
        generation = self._membership.enter()
        self._cost = cost
        self._began_ns = self._engine.recorder.enter("communication")
        self._is_settling = self.can_go_on = True
        self._enter_as(generation)

    def _give_up_group(self) -> bool:
        """Nothing that is on its way in the group will arrive; returns whether the others have all of this rank's."""
        before = self._events.synchronizer
        assert before is not None, "a group that was lost had one"
        self._began_ns = self._engine.recorder.enter("communication")
        self._before = before
        self._cost = before.own_cost()
        self._lines = []
        self._saves.abandon()
        before.close()
        if not self.is_over:
            self._events.undo()  # before this rank tells of the run: what it undoes is not in the history
        merged = before.abandon()
        if merged is not None:
            self._events.follow(merged)
        self._tried = self._engine.rank_info.generation
        self._is_settling = True
        return has_handed_in(before, self._engine)

    def _enter_as(self, generation: Generation) -> None:
        self._tried = generation.number
        self._enter(generation, self._cost)
        self._is_settling = False
        recorder = self._engine.recorder
        ms = (recorder.enter("other") - self._began_ns) / 1e6
        fields = {"number": generation.number, "why": generation.why, "ranks": len(generation.members), "ms": ms}
        recorder.event("generation", slot=self._engine.state.trained, again=self._again, **fields)
        lines = [f"  up to {self._again:,} samples are trained again"] if self._again and not self._lines else []
        self._membership.settled(generation.number, [*self._lines, *lines])

    def defer_joins(self) -> None:
        """In a loop of the user's own others join at epoch starts: there all ranks' scripts are at one place."""
        if self._engine.is_own_loop:
            self._membership.defer_joins(self._members)

    def let_in(self, deferred: int) -> None:
        """Others wait to join in this generation, as one of the ranks knows: GroupLostError, and all settle in it."""
        if deferred > self._engine.rank_info.generation:
            self._membership.let_in()
            raise GroupLostError("others join")

    @property
    def deferred(self) -> int:
        """The generation in which others wait to join, as far as this rank knows."""
        return self._membership.deferred

    def _enter(self, generation: Generation, cost: Cost | None) -> None:
        engine = self._engine
        info = self._engine.rank_info
        state = engine.state
        old_members, before = self._members, self._before
        group = self._membership.form(generation, is_own_loop=engine.is_own_loop)
        info.go_on_as(generation.number, generation.roster, generation.members.index(info.member), group)
        engine.recorder.go_on_as(info.rank)
        if isinstance(before, GradientSync):
            before.end_applied()
        own = self._standing(before)
        settlement = compare(group, own)
        if isinstance(before, GradientSync):
            end_between_updates(before, own, settlement)
        is_local, source = settlement.furthest.is_local, settlement.source
        found: dict[str, Any] = {}
        shared = broadcast_json(group, self._shared() if group.rank == source else None, source)
        if self._events.own_loop is not None:
            self._events.own_loop.compare(group)
        kept = share_kept(group, settlement, state.kept) if shared["has_kept"] else None
        if is_local:
            if settlement.has_newcomers:
                take_replica(engine, group, source, own.is_newcomer, with_buffers=True)
            before = self._blank() if before is None else before
            assert isinstance(before, LocalSGD), "as the furthest one"
            settle_buffers(engine, None if own.is_newcomer else before, own, settlement)
            agreed = settle_local(before, group, generation, settlement, shared)
            found = describe(agreed, generation.members, settlement, engine.axis)
            lost, ended = agreed.lost_logs, []
        else:
            assert before is None or isinstance(before, GradientSync), "as the furthest one"
            if not settle_exact(engine, before, own, settlement, generation.members, shared["scaler"]):
                self._roll_back(generation, settlement, cost)
                return
            settle_buffers(engine, before, own, settlement)
            losses = settled_losses(engine.meter, old_members, info.member, generation.members)
            agreed_past = broadcast_json(group, {"ended": self._generations(before), "losses": losses}, source)
            take_losses(engine.meter, agreed_past["losses"], info.rank, are_taken=settlement.has_taken_losses)
            ended = agreed_past["ended"]
            lost = lost_logs(ended, generation.members, engine.axis)
            state.take(shared)
            if own.is_newcomer:
                engine.seed_as_newcomer()
        # From here on this member has settled, whatever happens while the ranks begin to train again.
        self._members, self._settled = generation.members, generation.number
        state.enter_generation(shared, self._segment(generation) | found, lost, ended)
        if engine.config.is_local and (info.world_size == 1 or not is_local):
            state.end_generations()
        self._again = found.get("again_samples", 0 if not self._lines else self._again)
        self.is_over = settlement.is_over  # whoever is not needs the others once more
        if not self.is_over:
            self._events.undo()
        is_past = own.event < settlement.furthest.event
        self._events.settle_callbacks(counts=is_past)
        if is_past:
            self._events.take_over(shared, kept, settlement.furthest.event, is_newcomer=own.is_newcomer)
        if isinstance(before, GradientSync):
            before.expect_losses()
        info.has_settled()
        if not self.is_over or settlement.has_newcomers:  # who has just come has nothing yet to go on with
            self._train_on(old_members, before, cost, settlement)

    def _train_on(
        self, old_members: Sequence[str], before: Synchronizer | None, cost: Cost | None, settlement: Settlement | None
    ) -> None:
        """All have settled: divide the work anew, and go on with another synchronizer than `before`.

        `settlement` is None where they went back to a checkpoint.
        """
        engine = self._engine
        kept = [old_members.index(member) for member in self._members if member in old_members]
        engine.leave_group()
        engine.follow_ranks(config_of(engine.config, kept))
        engine.leave_shards()
        if settlement is None:  # no earlier: a loss in this exchange must find the rank gone back entirely
            exchange_losses(engine.meter, engine.rank_info.group)
        self._rank.go_on_after(before, cost, None if settlement is None else settlement.event_loss)
        self._synchronizer.buffers.go_on_from(0 if settlement is None else settlement.furthest.averages)
        if isinstance(before, LocalSGD) and engine.rank_info.world_size == 1:
            while (call := before.event_due(self._events.done)) is not None:
                before.passed(self._events.follow(call))

    def _roll_back(self, generation: Generation, settlement: Settlement, cost: Cost | None) -> None:
        """A shard is lost for good: go back to the newest checkpoint with all who are left, and train on from there."""
        engine = self._engine
        if engine.is_own_loop:
            raise RankError("a shard and its copy are lost, and a loop of your own cannot go back to a checkpoint")
        engine.recorder.enter("checkpoint")  # reading may last
        gone = ", ".join(member for member in settlement.furthest.members if member not in generation.members)
        lost = f"{gone} had a part of the model of which no copy is left" if gone else "ranks are a step apart"
        found = read_newest(engine, engine.rank_info.group, self._saves.out, lost)
        engine.recorder.enter("communication")
        furthest = max(one.progress for one in settlement.standings)
        if isinstance(self._before, GradientSync):
            self._before.end_interrupted(was_applied=False, fault=None)
        go_back(engine, self._events, found)
        fresh = self._rank.new_synchronizer()  # what the old one knows of the replica is past
        assert isinstance(fresh, GradientSync), "shards are trained by exact policies"
        fresh.expect_losses()
        self._before = fresh
        old_members = self._members
        self._members = generation.members
        self._settled = generation.number
        samples = engine.axis.samples_before(max(furthest, found.slot)) - engine.axis.samples_before(found.slot)
        if self._lines:  # gone back before, and lost another one since
            samples = max(samples, self._again)
        self._again, self.is_over = samples, False
        self._lines = [
            *found.notes,
            f"  {found.name}: {samples:,} samples are trained again, from step {found.slot} on",
        ]
        engine.state.begin_segment(self._segment(generation) | {"checkpoint": found.name, "again_samples": samples})
        engine.rank_info.has_settled()
        self._train_on(old_members, fresh, cost, None)

    @property
    def _synchronizer(self) -> GradientSync | LocalSGD:
        """Of the present generation."""
        found = self._events.synchronizer
        assert isinstance(found, GradientSync | LocalSGD), "one of the two"
        return found

    def _blank(self) -> LocalSGD:
        """Of a newcomer to a local policy."""
        found = self._rank.new_synchronizer()
        assert isinstance(found, LocalSGD), "there are others"
        found.begin_blank()
        return found

    def _standing(self, before: Synchronizer | None) -> Standing:
        if before is None:
            return Standing(NEWCOMER, NEWCOMER, NEWCOMER, ())
        step = self._engine.step
        updates = 0 if before.is_local else step.updates_so_far
        return Standing(
            self._settled,
            before.done,
            self._events.done,
            self._members,
            is_local=before.is_local,
            is_over=self.is_over,
            event_loss=before.event_loss,
            fault=step.fault_so_far if updates else self._engine.state.dropped.last_fault,
            skips=len(self._engine.state.skipped),
            averages=before.buffers.averages,
            updates=updates,
        )

    def _generations(self, before: GradientSync | None) -> list[dict[str, Any]]:
        """All that are over, as the source knows them: with the one in which `before` trained."""
        guard = None if before is None else before.guard
        ended = [] if guard is None else [{"members": list(self._members), **guard.record()}]
        return [*self._engine.state.generations, *(one for one in ended if one["first"] < one["end"])]

    def _shared(self) -> dict[str, Any]:
        """What the source tells of the run."""
        return {**self._engine.state.shared(), **self._events.record(), "scaler": scaler_state(self._engine)}

    def _segment(self, generation: Generation) -> dict[str, Any]:
        return {
            "slot": self._engine.state.trained,
            "samples": self._engine.state.samples_before(self._engine.state.trained),
            "devices": [str(device) for device in generation.roster.devices],
            "generation": generation.number,
            "why": generation.why,
            "members": list(generation.members),
        }


def is_parting(synchronizer: Synchronizer, engine: Engine) -> bool:
    """Whether a rank leaves after the last exchange; the same on all ranks. One that is alone stays."""
    return Wish.LEAVE in synchronizer.wished and engine.rank_info.world_size > 1


def has_handed_in(synchronizer: Synchronizer, engine: Engine) -> bool:
    """Whether all that this rank has trained is in a sum that the others have, or are about to have."""
    if not is_parting(synchronizer, engine):
        return False  # another rank was lost: whether the last sum counts is not known before they have settled
    return synchronizer.has_handed_in


def why_nobody_goes(engine: Engine, has_membership: bool) -> dict[str, str | None]:
    """For the launcher: why the loss of a rank ends this run, or why none can leave though its end would say so."""
    if has_membership:
        return {"ends_because": why_not(engine)}
    fixed = "it has on_fault='end'" if engine.config.on_fault == "end" else "it has one rank, or trains by hand"
    return {"stays_because": fixed}


def go_back(engine: Engine, events: RunEvents, found: Found) -> None:
    """This rank is where the checkpoint was taken; no collective, and nothing that another rank may wait for."""
    resumed = found.resumed
    engine.keep_whole(resumed.full_state(engine), rolled_back=found.which)
    engine.leave_shards()
    resumed.go_back(engine)
    events.go_back(resumed.own.record["callbacks"])
