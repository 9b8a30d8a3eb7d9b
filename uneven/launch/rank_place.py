"""The place of this process among the ranks, through all generations: who it is, on which roster, and what changed.

Held by the process context (launch/context.py). Where a launcher of ours started the ranks, its heartbeat says when
others are lost; a run settles on the new roster by its Membership, and the next run of the script begins with it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from uneven.comm.group import Group
from uneven.comm.store import Forming, Store, get_text
from uneven.config import RunConfig
from uneven.errors import GroupLostError
from uneven.hardware.roster import Roster
from uneven.launch.environment import LaunchEnvironment
from uneven.launch.heartbeat import GENERATION_KEY, SIGNAL_KEY, roster_key
from uneven.launch.membership import RunStart, Steps, StoreMembership, form_ranks, has_crowd, waiting_limit_s
from uneven.launch.run_status import Output
from uneven.results.progress import Reporter
from uneven.train.rank_info import Generation, RankInfo
from uneven.train.worker import Worker

NOT_OVER: Mapping[str, Any] = MappingProxyType({"is_past": False})


class RankPlace:
    """Life cycle: one per process. `roster` is None where the ranks were not placed by a launcher of ours."""

    def __init__(self, environment: LaunchEnvironment, roster: Roster | None, *, joins: int | None = None) -> None:
        """`joins`: this process is to join; `roster` is that of this generation with its machine's ranks added."""
        self.environment, self.roster = environment, roster
        self.generation = joins or 0  # the number of that roster
        self.is_newcomer = joins is not None  # until it is in a roster
        self.slot = 0  # trained in the last run
        self.has_trained = False  # in any run so far
        self.has_result = False  # whether the current run has one
        self.over = NOT_OVER  # for a heartbeat: what became of the last run, where no other has begun
        self.newest: Generation | None = None  # that the heartbeat has read
        self.membership: StoreMembership | None = None  # of the current run
        self._is_leaving = False  # the launcher has asked this rank to go

    def met(self, environment: LaunchEnvironment) -> None:
        """Under another launcher: the ranks know each other's addresses."""
        self.environment = environment

    def begin_run(self) -> None:
        self.over = NOT_OVER

    def note_result(self) -> None:
        """The current run has one."""
        self.has_result = True

    def is_first(self, rank: int) -> bool:
        """Whether this is rank 0 by the newest roster that is known, which its run may not have settled on."""
        return rank == 0 if self.newest is None else self.newest.members[0] == self.environment.member

    @property
    def is_guest(self) -> bool:
        """Whether this rank is on a machine that has joined the leader's."""
        return self.roster is not None and self.roster.machines[self.environment.rank] != 0

    def hear(self, roster: str) -> None:
        """The launcher has published another generation; on a heartbeat's thread."""
        self.newest = Generation.from_json(json.loads(roster))
        if (membership := self.membership) is not None:
            membership.announce(self.newest)

    def leave(self, is_leaving: bool) -> None:
        """The launcher has asked this rank to go, or to stay after all; on a heartbeat's thread."""
        self._is_leaving = is_leaving
        if (membership := self.membership) is not None:
            membership.ask_to_leave(is_leaving)

    def show(self) -> dict[str, Any]:
        """For a heartbeat, while no worker trains: the user's own code runs, or our setup; both may take their time."""
        return {"slot": 0, "phase": "setup", **self.over}

    def leave_run(self, worker: Worker | None, *, has_formed: bool) -> None:
        """The run is over for this rank, or has failed. `has_formed`: it had a group; `worker` is None with Ddp.wrap.

        Where nobody can go on without a rank, the others fail before the launcher sees who was lost. They must not say
        then that they are past the run: it would count as one that has its result.
        """
        over: dict[str, Any] = {"is_past": has_formed}
        self.has_trained |= has_formed if worker is None else worker.has_trained
        if worker is not None:
            self.slot = worker.engine.state.trained
            if worker.settler is None and not self.has_result:
                over = {"is_past": False, "ends_because": worker.show().get("ends_because")}
        self.over = over  # in one piece: the heartbeat's thread reads it
        self.membership, self.has_result = None, False

    def was_peer_terminated(self) -> bool:
        """Under another launcher, after a run: whether it ended early because another rank got a SIGTERM."""
        if not self.environment.is_external or self.environment.world_size == 1:
            return False
        try:
            return get_text(self.environment.connect(""), SIGNAL_KEY) is not None
        except RuntimeError:  # the store is gone with rank 0
            return False

    def catch_up(self) -> None:
        """Between runs: ranks may have been lost when this one had left the last run already."""
        if self.environment.world_size == 1 or self.is_newcomer:
            return
        store = self.environment.connect("")
        number = int(get_text(store, GENERATION_KEY) or 0)
        if number > self.generation:
            self.adopt(Generation.from_json(json.loads(store.get(roster_key(number)))))

    def await_peers(self, store: Store) -> None:
        """Before a run's ranks compare anything: until all have come. GroupLostError where the others never will.

        A script may catch the error of a run that failed in this rank alone and begin another one, while the others go
        on with the first, without this rank, and are fewer when they begin.
        """
        store.set(f"here/{self.environment.rank}", "1")
        keys = [f"here/{rank}" for rank in range(self.environment.world_size)]

        def have_come() -> bool:
            if self.newest is not None and self.environment.member not in self.newest.members:
                self.adopt(self.newest)
            return bool(store.check(keys))

        Forming().poll(have_come)

    def adopt(self, generation: Generation) -> None:
        """From now on this process is one of these ranks, also in the next run of the same script."""
        member, roster = self.environment.member, generation.roster
        if member not in generation.members:
            raise GroupLostError(f"this rank was given up, and the others go on: {generation.why}")
        rank = generation.members.index(member)
        self.generation, self.roster = generation.number, roster
        self.is_newcomer = False
        local = len(roster.local_ranks(rank))
        self.environment = replace(self.environment, rank=rank, world_size=len(roster.devices), local_world_size=local)

    def join(
        self,
        run: int,
        rank_info: RankInfo,
        config: RunConfig,
        output: Output,
        facts: Mapping[str, Any] = MappingProxyType({}),
        before_enter: Callable[[], None] = lambda: None,
        on_entered: Callable[[], None] = lambda: None,
    ) -> StoreMembership:
        """Make the membership of a run before its first group forms; `on_entered`: called when a newcomer has one."""
        prefix = f"run/{run}/g"

        def make_group(generation: Generation, rank: int) -> Group:
            store = self.environment.connect(f"{prefix}/{generation.number}")
            roster, number = generation.roster, generation.number  # settings and model were compared at the start
            is_stale = partial(membership.is_stale, number)
            return form_ranks(store, roster, rank, config, has_crowd(roster), generation=number, is_stale=is_stale)

        def on_formed(generation: Generation, rank: int) -> None:
            if rank == 0 < self.environment.rank and isinstance(output, Reporter) and config.progress != "off":
                output.style = "lines"  # the rank that showed the progress is lost
            was_newcomer = self.is_newcomer
            self.adopt(generation)
            if was_newcomer:
                on_entered()

        def on_settled(lines: Sequence[str]) -> None:
            if not rank_info.roster.is_one_machine:
                store = self.environment.connect(f"{prefix}/{rank_info.generation}/clock")
                rank_info.read_clocks(store)
            output.say(lines)

        start = RunStart(run, self.generation, waiting_limit_s(config.deadline), facts)
        steps = Steps(make_group, on_formed, on_settled, before_enter)
        membership = StoreMembership(self.environment.connect(""), self.environment.member, start, steps)
        membership.ask_to_leave(self._is_leaving)
        self.membership = membership
        return membership
