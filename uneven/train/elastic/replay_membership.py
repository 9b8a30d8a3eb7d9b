"""A Membership that follows a log: generations begin and end where they did in the recorded run.

Nobody is lost in a replay. A member that has done all that it did in a generation gives its group up by itself, as
others did when they lost a rank, and settles in the next one by the code of the run (train/elastic/settler.py). Whoever
was lost leaves instead. So whatever ranks do when they settle is repeated with the same bits, and need not be in the
log.

[Note: the end of a generation] Only what counted is repeated. A step, round, event or average of buffers counted if any
rank that was left had it (train/elastic/settle.py), and then all members do it here, those included that had not come
so far.
"""

import time
from collections.abc import Callable

import torch

from uneven.comm.group import Group
from uneven.comm.store import Store
from uneven.data.replay_generations import End, RecordedGeneration, RecordedGenerations
from uneven.errors import GroupLostError
from uneven.hardware.roster import Roster
from uneven.policy.recorded import RecordedSchedule
from uneven.train.elastic.membership import Generation
from uneven.train.engine import Engine
from uneven.train.gradient_sync import GradientSync
from uneven.train.local_sgd import LocalSGD
from uneven.train.run_events import RunEvents
from uneven.train.synchronizer import Synchronizer

POLL_S = 0.01
AS_RECORDED = "the recorded generation of ranks ends here"


class LeftReplayError(Exception):
    """This member was lost here in the recorded run: its part of the replay is over."""


class ReplayMembership:
    """Life cycle: one per member of a replay; `follow` before it trains. The worker calls the rest.

    `store` is used by this member's training thread alone. `make_group` forms a later generation's group as this rank
    of it; `roster_of` says on which devices its members train now.
    """

    def __init__(
        self,
        recorded: RecordedGenerations,
        member: str,
        store: Store,
        record_store: Callable[[], Store],
        make_group: Callable[[Generation, int], Group],
        roster_of: Callable[[RecordedGeneration], Roster],
    ) -> None:
        self._recorded, self._member, self._store, self._record_store = recorded, member, store, record_store
        self._make_group, self._roster_of = make_group, roster_of
        self._group: Group | None = None  # of a later generation
        self._has_result = False
        self._engine: Engine
        self._events: RunEvents

    def follow(self, engine: Engine, events: RunEvents) -> None:
        self._engine, self._events = engine, events
        engine.rank_info.recorded = self._recorded
        events.before_reach, events.on_use = self._before_event, self._watch

    def begin(self, facts: object) -> None:
        """Nobody joins who was not there."""

    def enter(self) -> Generation:
        return self._gather_members(next(one for one in self._recorded.generations if self._member in one.members))

    def is_stale(self, number: int) -> bool:
        """Whether this member has done all that counts of its present generation, and another follows."""
        end, synchronizer = self._recorded.generations[number].end, self._events.synchronizer
        if end is None or end.is_over:
            return False  # where all had finished, `finish` leads to the next one
        if self._events.done < end.event:  # a member that was lost may have nothing to train before it
            return False
        if isinstance(synchronizer, LocalSGD):
            schedule = synchronizer.slot_schedule
            return isinstance(schedule, RecordedSchedule) and schedule.is_at_end
        return self._engine.trained >= end.trained

    def await_next(self, number: int, cause: str) -> Generation:
        following, end = self._recorded.after(number), self._recorded.generations[number].end
        if following is None or end is None or not (self._has_result or self.is_stale(number)):
            raise GroupLostError(cause)  # a rank of the replay itself is lost
        self._has_result = False
        self._complete(end)
        if self._member not in following.members:
            raise LeftReplayError(self._member)
        return self._gather_members(following)

    def is_leaving(self) -> bool:
        """Whoever left in the recorded run leaves at the end of the generation, as one that was lost."""
        return False

    def must_leave(self) -> bool:
        return False

    def leave(self, number: int, samples: int) -> Generation:
        raise AssertionError(f"nobody is asked to leave a replay: {number}, {samples}")

    def defer_joins(self, members: tuple[str, ...]) -> None:
        """Who joins does so where it did in the recorded run."""

    @property
    def deferred(self) -> int:
        return 0

    def let_in(self) -> None:
        """Nobody waits."""

    def form(self, generation: Generation, *, is_own_loop: bool = False) -> Group:
        del is_own_loop
        before, self._group = self._group, None
        if before is not None:
            before.close()
        self._group = self._make_group(generation, generation.members.index(self._member))
        return self._group

    def record_store(self) -> Store:
        return self._record_store()

    def settled(self, number: int, lines: list[str]) -> None:
        """Nobody waits to hear it."""

    def finish(self, number: int) -> None:
        if self._recorded.after(number) is not None:
            self._has_result = True
            raise GroupLostError(AS_RECORDED)

    def _watch(self, synchronizer: Synchronizer) -> None:
        """An exact policy reaches an event right after its step: see whether that was in this generation."""
        before = synchronizer.after_step
        if not isinstance(synchronizer, GradientSync):
            return

        def after_step(slot: int) -> int:
            ns, end = before(slot), self._end
            if end is not None and end.event < slot and not end.has_loss and self._is_at_end:
                raise GroupLostError(AS_RECORDED)
            return ns

        synchronizer.after_step = after_step

    def _before_event(self, slot: int) -> None:
        end = self._end
        if end is not None and end.event < slot and self._is_at_end:
            raise GroupLostError(AS_RECORDED)

    @property
    def _end(self) -> End | None:
        return self._recorded.generations[self._engine.rank_info.generation].end

    @property
    def _is_at_end(self) -> bool:
        return self.is_stale(self._engine.rank_info.generation)

    def _complete(self, end: End) -> None:
        """[Note: the end of a generation] What is left of it: an average of buffers, and that all have come so far."""
        synchronizer = self._events.synchronizer
        assert isinstance(synchronizer, GradientSync | LocalSGD), "one of the two"
        while synchronizer.buffers.averages < end.averages:
            synchronizer.average_buffers()
        try:
            self._engine.rank_info.group.all_reduce(torch.zeros(1)).wait()
        except GroupLostError:
            """Another one had the sum and closed the group: all have come."""

    def _gather_members(self, recorded: RecordedGeneration) -> Generation:
        """All members of the next generation are there: forming its group takes no long time."""
        keys = {name: f"replay/{recorded.number}/{name}" for name in recorded.members}
        self._store.set(keys[self._member], "1")
        while not self._store.check(list(keys.values())):
            time.sleep(POLL_S)
        return Generation(recorded.number, self._roster_of(recorded), recorded.members, recorded.why)
