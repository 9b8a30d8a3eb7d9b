"""How a rank goes on when another one is lost: wait for the next generation, form its group, settle, train on.

Made by the worker once its first group has formed, where the run can go on without a rank. A loss while it settles
begins the same again with the generation after that.
"""

from collections.abc import Callable, Sequence
from typing import Any

from uneven.errors import GroupLostError
from uneven.policy.finish import Cost
from uneven.train.engine import Engine
from uneven.train.gradient_sync import GradientSync
from uneven.train.local_sgd import LocalSGD
from uneven.train.membership import Generation, Membership
from uneven.train.round_records import RoundRecords
from uneven.train.run_events import RunEvents
from uneven.train.run_record import RunRecord
from uneven.train.saves import Saves
from uneven.train.settle import (
    NEWCOMER,
    Standing,
    admits,
    compare,
    config_of,
    lost_logs,
    position_of,
    settle_exact,
    share_record,
    take_position,
    take_replica,
)
from uneven.train.settle_local import abandon, describe, settle_local
from uneven.train.settle_shards import leave_shards
from uneven.train.step_guard import StepGuard
from uneven.train.synchronizer import Synchronizer

GoOn = Callable[[Synchronizer | None, Cost | None, float | None], None]


class Settler:
    """Life cycle: `check` between steps, `settle` where a GroupLostError was raised; until the run's result is there.

    `members`: of the generation in which the run began, in rank order; none for a newcomer, which begins with `join`.
    `go_on(before, cost, event_loss)` goes on with a new synchronizer in place of the lost group's, if there was one.
    """

    def __init__(
        self,
        engine: Engine,
        run: RunRecord,
        events: RunEvents,
        saves: Saves,
        membership: Membership,
        members: Sequence[str],
        go_on: GoOn,
        new_synchronizer: Callable[[], Synchronizer],
    ) -> None:
        self._engine, self._run, self._events, self._saves = engine, run, events, saves
        self._membership, self._go_on, self._new_synchronizer = membership, go_on, new_synchronizer
        self._members, self._settled = tuple(members), engine.rank_info.generation
        self.is_over = False  # nothing is left to train: only results are exchanged
        self._again = 0  # samples that are trained again in this generation, at most, where it is known
        saves.check = self.check
        if engine.config.is_local:
            engine.rank_info.records = RoundRecords(membership.record_store(), engine.rank_info.member)

    def begin(self) -> None:
        """With the first group: tell those who may join later what they must know beforehand."""
        config, info = self._engine.config, self._engine.rank_info
        if info.rank == 0 and admits(config):
            exact = {"global_batch_size": self._engine.axis.slot_size, "max_global_batch_size": None}
            self._membership.begin({"config": {**({} if config.is_local else exact), "accumulate": config.accumulate}})

    def show(self) -> dict[str, Any]:
        """For the launcher: that the run can go on without ranks, and whether others may join; from any thread."""
        config = self._engine.config
        allowed = {"min_ranks": config.min_ranks, "restarts": config.restarts}
        return {**allowed, "admits": admits(config) and not self.is_over}

    def check(self) -> None:
        """GroupLostError where a newer generation was announced: a rank may train on for long without the others."""
        if self._membership.is_stale(self._engine.rank_info.generation):
            raise GroupLostError("a newer generation of ranks was announced")

    def finish(self) -> None:
        """Wait until all ranks have the run's result."""
        self._membership.finish(self._engine.rank_info.generation)

    def settle(self, lost: GroupLostError) -> None:
        """Go on with whoever is left; raises where the run cannot, with the words of `lost`."""
        recorder, info = self._engine.recorder, self._engine.rank_info
        began_ns = recorder.enter("communication")
        before = self._events.synchronizer
        assert before is not None, "a group that was lost had one"
        cost = before.own_cost()
        self._saves.abandon()
        before.close()
        if isinstance(before, LocalSGD):
            self._events.undo()
            abandon(before)
        generation, cause = self._membership.await_next(info.generation, str(lost)), str(lost)
        while True:
            try:
                self._enter(generation, before, cost)
                break
            except GroupLostError as again:
                cause = str(again)
                generation = self._membership.await_next(generation.number, cause)
        self._tell(generation, (recorder.enter("other") - began_ns) / 1e6)

    def join(self, cost: Cost) -> None:
        """Of a newcomer that is ready: take part in the first generation that has it, and train on in it."""
        recorder = self._engine.recorder
        recorder.enter("communication")
        generation = self._membership.enter()
        while True:
            try:
                self._enter(generation, None, cost)
                break
            except GroupLostError as again:
                generation = self._membership.await_next(generation.number, str(again))
        self._tell(generation, 0.0)

    def _tell(self, generation: Generation, ms: float) -> None:
        fields = {"number": generation.number, "why": generation.why, "ranks": len(generation.members), "ms": ms}
        self._engine.recorder.event("generation", slot=self._engine.trained, again=self._again, **fields)
        lines = [f"  up to {self._again:,} samples are trained again"] if self._again else []
        self._membership.settled(generation.number, lines)

    def _enter(self, generation: Generation, before: Synchronizer | None, cost: Cost | None) -> None:
        """`before` was this rank's synchronizer; a newcomer has none."""
        engine, info, run = self._engine, self._engine.rank_info, self._run
        old_members = self._members
        group = self._membership.form(generation)
        info.go_on_as(generation.number, generation.roster, generation.members.index(info.member), group)
        engine.recorder.rank = info.rank
        if isinstance(before, GradientSync) and before.guard is not None:
            before.guard.end_applied()
        own = self._standing(before)
        settlement = compare(group, own)
        is_local, source = settlement.furthest.is_local, settlement.source
        found: dict[str, Any] = {}
        record = share_record(group, source, self._record())
        if is_local:
            if settlement.has_newcomers:
                take_replica(engine, group, source, own.is_newcomer, with_buffers=True)
            before = self._blank() if before is None else before
            assert isinstance(before, LocalSGD), "as the furthest one"
            agreed = settle_local(before, group, generation.members, settlement)
            found, run.lost_logs = describe(agreed, generation.members, settlement, engine.axis), agreed.lost_logs
        else:
            assert before is None or isinstance(before, GradientSync), "as the furthest one"
            settle_exact(engine, before, own, settlement, generation.members)
            run.generations = share_record(group, source, {"all": self._generations(before)})["all"]
            run.lost_logs = lost_logs(run.generations, generation.members, engine.axis)
        run.earlier_logs = record["earlier_logs"]
        if engine.config.is_local and (info.world_size == 1 or not is_local):
            # Alone, the rank has no rounds: what is known of the others by their rounds must not be forgotten.
            run.earlier_logs, run.lost_logs, run.generations = [*run.earlier_logs, *run.lost_logs], [], []
        # From here on this member has settled, whatever happens while the ranks begin to train again.
        self._members, self._settled = generation.members, generation.number
        if own.is_newcomer and not is_local:
            take_position(engine, record["position"])
        self._again = found.get("again_samples", 0)
        run.segments = [*record["segments"], self._segment(generation) | found]
        self._events.undo()
        if own.event < settlement.furthest.event:
            run.history[:], run.saves, run.monitored = record["history"], record["saves"], record["monitored"]
            engine.schedule.load_state_dict(record["schedule"])
            self._events.done = settlement.furthest.event
        if settlement.event_loss is not None:
            engine.meter.totals.zero_()
        if isinstance(before, GradientSync):
            before.guard = StepGuard(engine)
        info.has_settled()
        self.is_over = all(one.is_over for one in settlement.standings)  # whoever is not needs the others once more
        if self.is_over:
            return
        kept = [old_members.index(member) for member in generation.members if member in old_members]
        engine.eager.reducer = None  # of the lost group
        engine.follow_ranks(config_of(engine.config, kept))
        leave_shards(engine)
        self._go_on(before, cost, settlement.event_loss)
        if isinstance(before, LocalSGD) and info.world_size == 1:
            before.epochs.run()

    def _blank(self) -> LocalSGD:
        """Of a newcomer to a local policy."""
        found = self._new_synchronizer()
        assert isinstance(found, LocalSGD), "there are others"
        found.begin_blank()
        return found

    def _standing(self, before: Synchronizer | None) -> Standing:
        members, done, is_local = self._members, self._events.done, isinstance(before, LocalSGD)
        if before is None:
            return Standing(NEWCOMER, NEWCOMER, NEWCOMER, ())
        loss = before.event_loss if isinstance(before, GradientSync) else None
        progress = before.tally.lineage.merged if isinstance(before, LocalSGD) else self._engine.trained
        return Standing(self._settled, progress, done, members, is_local, self.is_over, loss)

    def _generations(self, before: GradientSync | None) -> list[dict[str, Any]]:
        """All that are over, as the source knows them: with the one in which `before` trained."""
        guard = None if before is None else before.guard
        ended = [] if guard is None else [{"members": list(self._members), **guard.record()}]
        return [*self._run.generations, *(one for one in ended if one["first"] < one["end"])]

    def _record(self) -> dict[str, Any]:
        """What the source tells of the run."""
        run, engine = self._run, self._engine
        return {
            "segments": run.segments,
            "earlier_logs": run.earlier_logs,
            "history": run.history,
            "saves": run.saves,
            "monitored": run.monitored,
            "schedule": engine.schedule.state_dict(first_needed=0),
            "position": position_of(engine),
        }

    def _segment(self, generation: Generation) -> dict[str, Any]:
        devices = [str(device) for device in generation.roster.devices]
        trained = self._engine.trained
        return {
            "slot": trained,
            "samples": self._engine.samples_before(trained),
            "devices": devices,
            "generation": generation.number,
            "why": generation.why,
        }
