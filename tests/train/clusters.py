"""A cluster of threads that loses ranks at chosen collectives, for tests of settling; with a leader of its own.

A loss is deterministic: the victim dies before or after it brought its tensor to the n-th collective of a generation,
and of those who are left some may get the result and others not, as with a real transport.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tests.ranks import Silent, ThreadGroup, _Room
from uneven.comm.work import Work
from uneven.errors import GroupLostError, Left
from uneven.hardware.device import parse_devices
from uneven.hardware.roster import Roster
from uneven.train.rank_info import Generation, RankInfo

T = TypeVar("T")
LIMIT_S = 60.0


@dataclass(frozen=True)
class Loss:
    """In this generation, at its n-th collective, this member dies: before it has brought anything, or after.

    `blind` members do not get the result of that collective, though all have brought their tensors.
    """

    victim: str
    collective: int
    generation: int = 0
    after: bool = False
    blind: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Join:
    """This newcomer, which is ready, is admitted when a member begins the n-th collective of a generation."""

    member: str
    collective: int
    generation: int = 0


class DiedError(RuntimeError):
    """What a victim's thread ends with."""


class Leader:
    """Announces generations, as the launcher does."""

    def __init__(self, members: Sequence[str], losses: Sequence[Loss], joins: Sequence[Join] = ()) -> None:
        self.losses, self.joins = tuple(losses), tuple(joins)
        self._changed = threading.Condition()
        self._rooms: list[_Room] = []
        self.generations: list[Generation] = []
        self.causes: list[str] = []
        self.failures: dict[str, BaseException] = {}  # of members that a test expects to fail
        self._finished: set[tuple[int, str]] = set()
        self._arrived: set[tuple[int, str]] = set()  # who waits for the generation after this one
        self.left: dict[str, int] = {}  # on purpose, with the samples that each has handed in
        self.facts: dict[str, Any] = {}  # that newcomers are told
        self.defers_joins = False  # who joins waits for an epoch's start
        self.begun = 0  # the collectives of a member before its first step
        self.collectives: list[int] = []  # of each generation, by the member that ran most
        self.store = MemoryStore()
        self._announce(tuple(members), "")

    def _announce(self, members: tuple[str, ...], why: str) -> None:
        roster = Roster.on_one_machine(parse_devices(["cpu"] * len(members)))
        left = tuple(member for member in self.left if member not in members)
        self.generations.append(Generation(len(self.generations), roster, members, why, left))
        self.collectives.append(0)
        self._rooms.append(_Room(len(members)))

    @property
    def newest(self) -> Generation:
        return self.generations[-1]

    def lose(self, member: str, why: str = "died") -> None:
        with self._changed:
            if member not in self.newest.members:
                return
            broken = list(self._rooms)  # also of one that was announced, and is not trained in yet
            left = tuple(other for other in self.newest.members if other != member)
            if left:
                self._announce(left, f"{member} {why}")
            self._changed.notify_all()
        for room in broken:
            room.fail()

    def admit(self, join: Join) -> None:
        with self._changed:
            if self.newest.number > join.generation or join.member in self.newest.members:
                return
            broken = self._rooms[-1]
            self._announce((*self.newest.members, join.member), f"{join.member} joins")
            self._changed.notify_all()
        if not self.defers_joins:
            broken.fail()

    def arrive(self, number: int, member: str, handed_in: int | None = None) -> Generation:
        """A member waits for the next generation. Once all do, those who have handed everything in are not in it."""
        with self._changed:
            self._arrived.add((number, member))
            if handed_in is not None and self.newest.number == number:
                self.left[member] = handed_in
            members = self.generations[number].members
            stay = tuple(other for other in members if other not in self.left)
            if self.newest.number == number and stay != members and {(number, one) for one in members} <= self._arrived:
                self._announce(stay, "leaves")
                self._changed.notify_all()
        found = self.wait_after(number)
        if member in found.members:
            self.left.pop(member, None)
        return found

    def wait_for(self, member: str) -> Generation:
        with self._changed:
            assert self._changed.wait_for(lambda: member in self.newest.members, LIMIT_S), f"{member} is not admitted"
            return self.newest

    def wait_after(self, number: int) -> Generation:
        with self._changed:
            assert self._changed.wait_for(lambda: self.newest.number > number, LIMIT_S), "no generation was announced"
            return self.newest

    def finish(self, number: int, member: str) -> None:
        with self._changed:
            self._finished.add((number, member))
            self._changed.notify_all()

            def are_done() -> bool:
                return all((number, other) in self._finished for other in self.generations[number].members)

            assert self._changed.wait_for(lambda: are_done() or self.newest.number > number, LIMIT_S), "not all finish"
            if not are_done():
                raise GroupLostError("a newer generation was announced")

    def group(self, generation: Generation, member: str) -> "LossyGroup":
        return LossyGroup(self, generation, self._rooms[generation.number], member)


class LossyGroup(ThreadGroup):
    """Runs the leader's plan of losses; the collectives of groups made from it count as well."""

    def __init__(self, leader: Leader, generation: Generation, room: _Room, member: str) -> None:
        super().__init__(room, generation.members.index(member))
        self.leader, self.number, self.member = leader, generation.number, member
        self.generation = generation.number
        self.started = [0]
        self.is_dead = False  # whatever its thread still does

    def abort(self, why: str) -> None:
        del why
        self._room.fail()

    def new_group(self) -> "LossyGroup":
        self._twins += 1
        with self._room.lock:
            room = self._room.twins.setdefault(self._twins, _Room(self.world_size))
        twin = LossyGroup(self.leader, self.leader.generations[self.number], room, self.member)
        twin.started = self.started
        if self._room.is_broken:
            room.fail()
        return twin

    def broadcast(self, tensor: Tensor, owner: int = 0) -> Work:
        # Nothing is ever written into what a rank sends to the others.
        return super().broadcast(tensor.clone() if owner == self.rank else tensor, owner)

    def _meet(self, tensor: Tensor, compute: Callable[[list[Tensor]], Tensor], owner: int | None = None) -> Work:
        if self.is_dead:
            raise DiedError
        place = self.started[0]
        self.started[0] += 1
        self.leader.collectives[self.number] = max(self.leader.collectives[self.number], self.started[0])
        for join in self.leader.joins:
            if (join.generation, join.collective) == (self.number, place):
                self.leader.admit(join)
        loss = next((o for o in self.leader.losses if (o.generation, o.collective) == (self.number, place)), None)
        if loss is None:
            return super()._meet(tensor, compute, owner)
        if loss.victim == self.member and not loss.after:
            self.is_dead = True
            raise DiedError(loss)
        brought = tensor.clone() if self.member in loss.blind else tensor
        work = super()._meet(brought, compute, owner)
        if loss.victim == self.member:
            work.wait()  # all have brought theirs
            self.is_dead = True
            raise DiedError(loss)
        if self.member in loss.blind:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 7)
            return Work(_LostWork(work), tensor, self.traffic)
        return work


class _LostWork:
    """A collective that was over on other ranks when the connection broke."""

    def __init__(self, inner: Work) -> None:
        self._inner = inner

    def wait(self) -> None:
        self._inner.wait()
        raise GroupLostError("connection closed by peer")

    def is_completed(self) -> bool:
        return False


class MemoryStore:
    """What records of rounds need of a store."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self.values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values[key] for key in keys]


class FakeMembership:
    """One member's view of the leader."""

    def __init__(self, leader: Leader, member: str) -> None:
        self._leader, self._member = leader, member
        self.settled_in: list[int] = []
        self.is_asked = False  # to leave
        self._let_in = 0  # up to this generation
        self.lines: list[str] = []  # for the user

    def is_leaving(self) -> bool:
        return self.is_asked

    def must_leave(self) -> bool:
        return self.is_asked

    def leave(self, number: int, samples: int) -> Generation:
        found = self._leader.arrive(number, self._member, samples)
        if self._member not in found.members:
            raise Left(found.why)
        return found

    def defer_joins(self, members: tuple[str, ...]) -> None:
        self._leader.defers_joins = True

    @property
    def deferred(self) -> int:
        newest = self._leader.newest
        if not self._leader.defers_joins or newest.number <= self._let_in:
            return 0
        grows = {*self._leader.generations[newest.number - 1].members} < {*newest.members}
        return newest.number if grows else 0

    def let_in(self) -> None:
        self._let_in = self._leader.newest.number

    def begin(self, facts: dict[str, Any]) -> None:
        self._leader.facts = facts

    def enter(self) -> Generation:
        return self._leader.wait_for(self._member)

    def is_stale(self, number: int) -> bool:
        return self._leader.newest.number > number and not self.deferred

    def await_next(self, number: int, cause: str) -> Generation:
        self._leader.causes.append(cause)
        found = self._leader.arrive(number, self._member)
        if self._member not in found.members:
            raise GroupLostError(cause)
        return found

    def form(self, generation: Generation, *, is_own_loop: bool = False) -> LossyGroup:
        return self._leader.group(generation, self._member)

    def record_store(self) -> Any:
        return self._leader.store

    def finish(self, number: int) -> None:
        self._leader.finish(number, self._member)

    def settled(self, number: int, lines: list[str]) -> None:
        self.settled_in.append(number)
        self.lines += lines


def on_lossy_threads(
    size: int,
    losses: Sequence[Loss],
    function: Callable[[RankInfo, LossyGroup, FakeMembership], T],
    joins: Sequence[Join] = (),
    failing: Collection[str] = (),
) -> tuple[dict[str, T], Leader]:
    """function(info, group, membership) on every member; the results of those who have not died.

    What members raise that are `failing` is in the leader's `failures`.
    A newcomer's group is of no use to it: its worker forms its first one when it is admitted.
    """
    members = [f"m{number}" for number in range(size)]
    leader = Leader(members, losses, joins)
    members += [join.member for join in joins]

    def run(rank: int) -> T | None:
        first = leader.generations[0]
        roster, is_newcomer = first.roster, rank >= size
        if is_newcomer:
            roster = Roster.on_one_machine(parse_devices(["cpu"] * (size + 1)))
        place = min(rank, size)
        info = RankInfo(place, roster.devices, roster=roster, member=members[rank], is_newcomer=is_newcomer)
        group = leader.group(first, members[0 if is_newcomer else rank])
        try:
            return function(info, group, FakeMembership(leader, members[rank]))
        except DiedError:
            leader.lose(members[rank])
            return None
        except Left:
            return None
        except BaseException as error:
            leader.failures[members[rank]] = error
            leader.lose(members[rank], f"failed: {error!r}")
            if members[rank] in failing:
                return None
            raise

    with ThreadPoolExecutor(len(members)) as pool:
        futures = [pool.submit(run, rank) for rank in range(len(members))]
    failed = [error for future in futures if (error := future.exception()) is not None]
    for error in failed:
        raise error
    found: dict[str, Any] = dict(zip(members, (future.result() for future in futures), strict=True))
    return {member: result for member, result in found.items() if result is not None}, leader


class Begun(Silent):
    """Notes when training has begun: a loss before that ends the run."""

    def __init__(self, group: LossyGroup) -> None:
        self._group = group

    def started(self, *_: Any) -> None:
        self._group.leader.begun = self._group.started[0]


def fill(model: nn.Module) -> None:
    """From a generator of its own, since threads share torch's global one; in double precision."""
    own = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=own) * 0.3)
    model.double()


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors.values()])
