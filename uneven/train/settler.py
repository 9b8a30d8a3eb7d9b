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
from uneven.train.run_events import RunEvents
from uneven.train.run_record import RunRecord
from uneven.train.saves import Saves
from uneven.train.settle import Standing, compare, config_of, lost_logs, settle_exact, share_record
from uneven.train.settle_local import abandon, describe, settle_local
from uneven.train.step_guard import StepGuard
from uneven.train.synchronizer import Synchronizer

GoOn = Callable[[Synchronizer, Cost | None, float | None], None]


class Settler:
    """Life cycle: `check` between steps, `settle` where a GroupLostError was raised; until the run's result is there.

    `members`: of the generation in which the run began, in rank order. `go_on(before, cost, event_loss)` makes the
    synchronizer of the new group from that of the lost one.
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
    ) -> None:
        self._engine, self._run, self._events, self._saves = engine, run, events, saves
        self._membership, self._go_on = membership, go_on
        self._members, self._settled = tuple(members), engine.rank_info.generation
        self.is_over = False  # nothing is left to train: only results are exchanged
        self._again = 0  # samples that are trained again in this generation, at most, where it is known

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
        ms = (recorder.enter("other") - began_ns) / 1e6
        fields = {"number": generation.number, "why": generation.why, "ranks": info.world_size, "ms": ms}
        recorder.event("generation", slot=self._engine.trained, again=self._again, **fields)
        lines = [f"  up to {self._again:,} samples are trained again"] if self._again else []
        self._membership.settled(generation.number, lines)

    def _enter(self, generation: Generation, before: Synchronizer, cost: Cost | None) -> None:
        engine, info, run = self._engine, self._engine.rank_info, self._run
        old_members = self._members
        group = self._membership.form(generation)
        info.rejoin(generation.number, generation.roster, generation.members.index(info.member), group)
        engine.recorder.rank = info.rank
        own = self._standing(before)
        settlement = compare(group, own)
        found: dict[str, Any] = {}
        if isinstance(before, LocalSGD):
            record = share_record(group, settlement.source, self._record(before))
            agreed = settle_local(before, group, generation.members, settlement)
            found, lost = describe(agreed, generation.members, settlement, engine.axis), agreed.lost_logs
        else:
            assert isinstance(before, GradientSync), "one of the two"
            settle_exact(engine, before, own, settlement)
            record = share_record(group, settlement.source, self._record(before))
            lost = lost_logs(record["generations"], generation.members, engine.axis)
        # From here on this member has settled, whatever happens while the ranks begin to train again.
        self._members, self._settled = generation.members, generation.number
        self._again = found.get("again_samples", 0)
        run.generations, run.lost_logs = record["generations"], lost
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
        self.is_over = all(one.is_over for one in settlement.standings)  # whoever is not needs the others once more
        if self.is_over:
            return
        kept = [old_members.index(member) for member in generation.members]
        engine.follow_ranks(config_of(engine.config, kept))
        self._go_on(before, cost, settlement.event_loss)
        if isinstance(before, LocalSGD) and info.world_size == 1:
            before.epochs.run()

    def _standing(self, before: Synchronizer) -> Standing:
        loss = before.event_loss if isinstance(before, GradientSync) else None
        progress = before.tally.lineage.merged if isinstance(before, LocalSGD) else self._engine.trained
        return Standing(self._settled, progress, self._events.done, self._members, self.is_over, loss)

    def _record(self, before: Synchronizer) -> dict[str, Any]:
        """What the source tells of the run."""
        run, engine = self._run, self._engine
        guard = before.guard if isinstance(before, GradientSync) else None
        ended = [] if guard is None else [{"members": list(self._members), **guard.record()}]
        return {
            "generations": [*run.generations, *(one for one in ended if one["first"] < one["end"])],
            "segments": run.segments,
            "history": run.history,
            "saves": run.saves,
            "monitored": run.monitored,
            "schedule": engine.schedule.state_dict(first_needed=0),
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
