"""The rank's groups: the first one of a run, and those of later generations, as a Membership.

`form_first_group` is called by launch/context.py. A StoreMembership is the rank's side of what the launcher publishes
in its store (launch/watch/watch.py), for a worker that can go on without ranks that are lost. The heartbeat's thread
reads a new roster first and aborts the present group, so that the thread that trains, wherever it waits, comes here.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from uneven.comm.form import form_group
from uneven.comm.group import Group
from uneven.comm.store import Store, get_text, under
from uneven.config import RunConfig
from uneven.errors import GroupLostError, Left, RankError
from uneven.hardware.choices import is_crowded
from uneven.hardware.roster import Roster
from uneven.launch.checks.parity import check_agreement
from uneven.launch.environment import LaunchEnvironment
from uneven.launch.heartbeat import (
    GENERATION_KEY,
    INTERVAL_S,
    LEAVE,
    handed_key,
    heartbeat_key,
    leave_key,
    ready_key,
    roster_key,
    settled_key,
    suspicion_key,
)
from uneven.launch.newcomer import OVER, facts_key, is_run_over, why_closed
from uneven.launch.watch.lost import WAITING_PHASES, silence_allowed_s
from uneven.train.rank_info import PARTING, Generation, RankInfo

POLL_S = 0.02
ALL, LOST = "all", "lost"  # whether every rank of a generation had the result before one was lost
LOST_EARLY = "a rank was lost before all of them had the result"
ANSWER_S = 10.0  # for the launcher, beyond the silence after which a rank is lost
# For members that a new group misses and the launcher does not judge: those that have left the run, and those that only
# wait, or write what they have of a checkpoint to its end before they come.
LEFT_S, WAITING_S = 20.0, 120.0


@dataclass(frozen=True)
class RunStart:
    """What a membership begins with: the number of the run in its script, and the first generation's.

    Of somebody who joins that is the one that it was told of, in which it is not. `limit_s`: how long the launcher may
    take to announce a generation. `facts` are told to those who join.
    """

    run: int
    generation: int
    limit_s: float
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Steps:
    """What a rank does on its way from one group to the next."""

    make_group: Callable[[Generation, int], Group]  # as this rank of the generation
    on_formed: Callable[[Generation, int], None] = lambda *_: None
    on_settled: Callable[[Sequence[str]], None] = lambda _: None
    before_enter: Callable[[], None] = lambda: None  # raises where a newcomer does not fit


class StoreMembership:
    """Life cycle: one per run and rank. `joined` with the first group; the worker calls the rest.

    `store` is used by the thread that trains alone, `announce` is called on the heartbeat's.
    """

    def __init__(self, store: Store, member: str, start: RunStart, steps: Steps) -> None:
        self._store = store
        self._member = member
        self._start = start
        self._run = start.run
        self._steps = steps
        self._newest: Generation | None = None  # that was announced since
        self._group: Group | None = None
        self._is_leaving = False  # as the heartbeat's thread has read it
        self._known: frozenset[str] | None = None  # members of the newest generation, where joins are deferred
        self._deferred: Generation | None = None

    def joined(self, group: Group) -> None:
        """The group of the start has formed."""
        self._group = group

    def announce(self, generation: Generation) -> None:
        """A newer generation is published: whatever waits for a collective of the present group is to give up."""
        before = self._deferred or self._newest
        if generation.number <= (self._start.generation if before is None else before.number):
            return
        is_deferred = self._known is not None and self._known < {*generation.members}
        self._known = None if self._known is None else frozenset(generation.members)
        if is_deferred:
            self._deferred = generation
            return
        self._deferred = None
        self._newest = generation  # before the group is read: `form` looks at it again when it has a new one
        if (group := self._group) is not None:
            group.abort(generation.why)

    def ask_to_leave(self, is_leaving: bool) -> None:
        """The leader wants this rank to go, or to stay after all; on the heartbeat's thread."""
        self._is_leaving = is_leaving

    def is_leaving(self) -> bool:
        return self._is_leaving

    def must_leave(self) -> bool:
        try:
            self._is_leaving = get_text(self._store, leave_key(self._member)) == LEAVE
        except RuntimeError as error:
            raise GroupLostError("the launcher is gone") from error
        return self._is_leaving

    def leave(self, number: int, samples: int) -> Generation:
        generation = self._wait_after(number, handed_key(number, self._member), str(samples), PARTING)
        if self._member not in generation.members:
            raise Left(generation.why)
        return generation

    def begin(self, facts: dict[str, Any]) -> None:
        self._store.set(facts_key(self._run), json.dumps({**self._start.facts, **facts}))

    def defer_joins(self, members: tuple[str, ...]) -> None:
        self._known = frozenset(members)

    @property
    def deferred(self) -> int:
        return 0 if (found := self._deferred) is None else found.number

    def let_in(self) -> None:
        if (found := self._deferred) is not None:
            self._deferred, self._newest = None, found

    def enter(self) -> Generation:
        self._steps.before_enter()
        try:
            self._store.set(ready_key(self._member), "1")
            while self._newest is None or self._member not in self._newest.members:
                if (why := why_closed(self._store)) is not None:
                    raise GroupLostError(f"this run cannot be joined any more: {why}")
                time.sleep(POLL_S)
                self._read()
        except RuntimeError as error:
            if isinstance(error, RankError):
                raise
            raise GroupLostError("the launcher of the run to join is gone") from error
        return self._newest

    def is_stale(self, number: int) -> bool:
        return self._newest is not None and self._newest.number > number

    def await_next(self, number: int, cause: str) -> Generation:
        generation = self._wait_after(number, suspicion_key(number, self._member), cause, cause)
        if self._member not in generation.members:
            raise GroupLostError(f"this rank was given up, and the others go on: {generation.why}")
        return generation

    def _wait_after(self, number: int, key: str, value: str, cause: str) -> Generation:
        """Tell the leader where this rank is, by `key`, and wait for the generation after this one."""
        end_s = time.monotonic() + self._start.limit_s
        known, self._known = self._known, None  # the group is lost: nobody waits any more
        self.let_in()
        try:
            if not self.is_stale(number):
                self._store.set(key, value)
            while not self.is_stale(number):
                if time.monotonic() > end_s:
                    raise GroupLostError(
                        f"{cause}; the launcher announced no other ranks within {self._start.limit_s:.0f} s"
                    )
                time.sleep(POLL_S)
                self._read()  # sooner than the heartbeat does
        except RuntimeError as error:
            if isinstance(error, RankError):
                raise
            raise GroupLostError(cause) from error  # the launcher is gone: this process is about to end
        assert self._newest is not None, "it is newer than `number`"
        self._known = None if known is None else frozenset(self._newest.members)
        return self._newest

    def _read(self) -> None:
        if (number := get_text(self._store, GENERATION_KEY)) is not None:
            self.announce(Generation.from_json(json.loads(self._store.get(roster_key(int(number))))))

    def form(self, generation: Generation, *, is_own_loop: bool = False) -> Group:
        rank = generation.members.index(self._member)
        before, self._group = self._group, None
        if before is not None:  # nobody uses it any more; torch's default group is one for the whole process
            before.abort(generation.why)
            before.close()
        try:
            self._await_all(generation, is_own_loop)
            group = self._steps.make_group(generation, rank)
        except RankError:
            raise
        except RuntimeError as error:  # of torch: a peer or the store is gone
            raise GroupLostError(str(error).partition("\n")[0]) from error
        self._group = group
        if self.is_stale(generation.number):
            assert self._newest is not None, "it is newer"
            group.abort(self._newest.why)
            group.close()
            raise GroupLostError(self._newest.why)
        self._steps.on_formed(generation, rank)
        return group

    def _await_all(self, generation: Generation, is_own_loop: bool) -> None:
        """Until all members are here, however long a step, an evaluation, a callback or a checkpoint keeps them.

        The launcher watches over those who are missing: one that is lost makes another generation. A group that was
        formed without waiting was given up after 20 s, with a healthy newcomer or, the sixth time, the whole run.
        """
        own = f"run/{self._run}/here/{generation.number}"
        keys = {member: f"{own}/{member}" for member in generation.members}
        self._store.set(keys[self._member], "1")
        limit_s, since_s = math.inf, 0.0
        looked_s = -math.inf
        heard: dict[str, tuple[str, float]] = {}  # of those who are missing: the last heartbeat, and when it was new
        while not self._store.check([*keys.values()]):
            if self.is_stale(generation.number):
                raise GroupLostError("a newer generation was announced")
            if is_run_over(self._store, self._run):  # they have ended without this newcomer
                raise GroupLostError(f"this run cannot be joined any more: {OVER}")
            if (now_s := time.monotonic()) - looked_s >= INTERVAL_S:
                looked_s, before_s = now_s, limit_s
                missing = [member for member, key in keys.items() if not self._store.check([key])]
                for member in missing:
                    text = get_text(self._store, heartbeat_key(member)) or "{}"
                    if heard.get(member, ("", 0.0))[0] != text:
                        heard[member] = text, now_s
                limit_s = patience_s([json.loads(heard[member][0]) for member in missing], is_own_loop)
                since_s = since_s if limit_s == before_s else now_s
                # Code of the user's own may have ended a rank by os._exit(0), which the launcher takes for its end.
                if any(now_s - heard[member][1] > WAITING_S for member in missing):
                    raise GroupLostError(f"a peer was silent for {WAITING_S:.0f} s: the group was not formed")
            if now_s - since_s > limit_s:
                raise GroupLostError(f"a peer did not come within {limit_s:.0f} s: the group was not formed")
            time.sleep(POLL_S)

    def record_store(self) -> Store:
        clone: Store = self._store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
        return under(f"run/{self._run}/records", clone)

    def settled(self, number: int, lines: list[str]) -> None:
        self._store.set(settled_key(number, self._member), f"{time.time():.3f}")
        self._steps.on_settled(lines)

    def finish(self, number: int) -> None:
        """All members come to the same verdict, which the store keeps: the first one that is written counts."""
        assert self._group is not None, "a rank that has the result had a group"
        counter = f"run/{self._run}/finished/{number}"
        if self._store.add(counter, 1) == self._group.world_size:
            self._store.compare_set(f"{counter}/verdict", "", ALL)
        while (verdict := get_text(self._store, f"{counter}/verdict")) is None:
            if self.is_stale(number):
                self._store.compare_set(f"{counter}/verdict", "", LOST)
            else:
                time.sleep(POLL_S)
        if verdict == LOST:
            raise GroupLostError(LOST_EARLY if self._newest is None else self._newest.why)


def patience_s(missing: Sequence[Mapping[str, Any]], is_own_loop: bool) -> float:
    """How long to wait on for members with these heartbeats; without an end where the launcher judges them.

    It does not judge who waits for others. In a loop of the user's own such a member may train on until its epoch ends.
    """
    if any("min_ranks" not in status for status in missing):
        return LEFT_S
    waits = not is_own_loop and all(status["phase"] in WAITING_PHASES for status in missing)
    return WAITING_S if waits else math.inf


def waiting_limit_s(deadline: Any) -> float:
    """How long a rank that has lost its group waits for the launcher, which may have to wait for a silence first."""
    return ANSWER_S + silence_allowed_s(deadline)


def form_ranks(
    store: Store,
    roster: Roster,
    rank: int,
    config: RunConfig,
    is_crowded: bool,
    *,
    generation: int = 0,
    is_stale: Callable[[], bool] = lambda: False,
) -> Group:
    """The group of these ranks, whose keys `store` has alone; 0 is the generation that a run starts with."""
    return form_group(
        store,
        rank,
        len(roster.devices),
        torch.device(roster.devices[rank].torch_name),
        config.backend,
        is_crowded,
        machines=roster.machines,
        verify=config.verify,
        generation=generation,
        is_stale=is_stale,
    )


def form_first_group(
    environment: LaunchEnvironment,
    run: int,
    rank_info: RankInfo,
    model: nn.Module,
    config: RunConfig | None,
    data: Sequence[str],
    say: Callable[[Sequence[str]], None],
    is_crowded: bool,
) -> Group:
    """Of the script's run of this number, once all ranks have compared settings, data and model.

    Without `config` the model is trained by hand, through host memory.
    """
    store = environment.connect(f"run/{run}")
    check_agreement(store, rank_info, model, config, data, say)
    if config is not None:
        return form_ranks(store, rank_info.roster, rank_info.rank, config, is_crowded)
    device = next((param.device for param in model.parameters()), torch.device("cpu"))
    machines = rank_info.roster.machines
    return form_group(store, rank_info.rank, rank_info.world_size, device, "cpu", is_crowded=False, machines=machines)


def has_crowd(roster: Roster) -> bool:
    """Whether ranks of one machine share a GPU."""
    machines = range(len(roster.hosts))
    return any(is_crowded([roster.devices[rank] for rank in roster.ranks_of(machine)]) for machine in machines)
