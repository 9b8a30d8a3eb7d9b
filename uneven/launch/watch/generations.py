"""Who is in a run, as its launcher knows it: the rosters that follow one another when ranks are lost or join.

Used by launch/watch/watch.py, which sees what happens to the processes, and tells the ranks what is decided here. No
process, store or clock in this file. Invariants: a generation's number grows by one; a member that has left is never
in a roster again; ranks keep their order, so rank 0 stays on the leader's machine, where results are written; who
joins is the last rank.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from uneven.comm.lost import sender_of
from uneven.errors import RankError
from uneven.hardware.roster import Roster
from uneven.launch.environment import BegunWithout
from uneven.launch.local_ranks import Newcomer
from uneven.train.rank_info import Generation

MOST_REPEATS = 5  # generations of the same members, one after the other, without a step
# What every rank raises alike, or would raise next: a new generation would meet it again.
COMMON_ERRORS = ("input", "refused", "not finite", "left")


class Generations:
    """Life cycle: one per launched run, from its roster at the start. Processes are numbered as they were started."""

    def __init__(self, roster: Roster, members: Sequence[str], without: BegunWithout | None = None) -> None:
        self._members = tuple(members)
        self.present = Generation(0, roster, self._members, "" if without is None else without.why)
        self._lost_before = 0 if without is None else without.of - len(without.left)
        self.given_up: set[int] = set()  # processes whose end does not matter any more
        self.waiting: dict[int, Newcomer] = {}  # processes that are to join, and are in no roster yet
        self.joining: set[int] = set()  # those that are in one, and have not settled with the others
        self.left: tuple[str, ...] = ()  # members that have left on purpose
        self._raised: set[tuple[str, str, int]] = set()
        self._repeats, self._done = 0, -1
        self._wrong: str | None = None  # the member that has sent wrong bits, since the last step

    @property
    def numbers(self) -> list[int]:
        """The processes of the present generation, in rank order."""
        return [self._members.index(member) for member in self.present.members]

    @property
    def lost(self) -> int:
        """How many processes the run goes on without."""
        return self._lost_before + len(self.given_up)

    @property
    def aside(self) -> set[int]:
        """Processes that the run neither waits for nor loses by their end."""
        return self.given_up | self.waiting.keys()

    def expect(self, newcomer: Newcomer) -> int:
        """A process was started that is to join; its number."""
        self._members += (newcomer.member,)
        self.waiting[len(self._members) - 1] = newcomer
        return len(self._members) - 1

    def admit(self, numbers: Sequence[int]) -> Generation:
        """The next generation, with these processes as its last ranks."""
        self._repeats = 0
        roster, members = self.present.roster, self.present.members
        names = []
        for number in numbers:
            newcomer = self.waiting.pop(number)
            self.joining.add(number)
            names.append(f"rank {len(members)} ({newcomer.device} on {newcomer.member.split('/')[0]})")
            roster = roster.with_rank(newcomer.device, newcomer.host)
            members = (*members, newcomer.member)
        joins = "joins" if len(names) == 1 else "join"
        why = f"{', '.join(names)} {joins}: {count_ranks(len(members), 'goes on', 'go on')}"
        return self._publish(roster, members, why)

    def refusal(self, statuses: Sequence[Mapping[str, Any]], lost: Collection[int]) -> str | None:
        """Why these processes cannot be lost without ending the run; None where the others go on.

        `statuses`: the last heartbeat of every process. One of those who are left without "min_ranks" is of a rank
        that cannot go on, or not yet: it says why, or the reason is empty and the loss itself is the cause.
        """
        settled = [number for number in self.numbers if number not in self.joining]  # who joins has no state yet
        left = [number for number in settled if number not in lost]
        needed = [int(statuses[number].get("min_ranks", is_past(statuses[number]))) for number in left]
        if not left:
            return "no rank is left" if any("min_ranks" in status for status in statuses) else ""
        if 0 in needed:
            return next((str(why) for status in statuses if (why := status.get("ends_because"))), "")
        if (why := next((why for number in left if (why := statuses[number].get("ends_because"))), None)) is not None:
            return str(why)
        roster = self.present.roster
        if roster.machines[self.numbers.index(left[0])] != 0:
            return f"no rank is left on {roster.hosts[0]}, which leads the run and has its files"
        if len(left) < max(needed):
            return f"{count_ranks(len(left))} left, and min_ranks={max(needed)}"
        return None

    def is_repeated(self, error: Mapping[str, Any]) -> bool:
        """Whether a rank has failed with this report's error at the same slot before: a bug, and not a fault."""
        key = (str(error["what"]), str(error.get("place")), int(error.get("slot", -1)))
        is_known = key in self._raised
        self._raised.add(key)
        return is_known

    def drop(self, lost: Collection[int], why: str) -> Generation:
        """The next generation, without these processes."""
        self._repeats, self._done = 0, -1  # they may go back to a checkpoint
        self._wrong = None
        self.joining -= {*lost}
        numbers = self.numbers
        ranks = [rank for rank, number in enumerate(numbers) if number in lost]
        members = tuple(self._members[number] for number in numbers if number not in lost)
        return self._publish(self.present.roster.without(ranks), members, why)

    def sends_wrong_again(self, causes: Sequence[str], done: int) -> int | None:
        """The process that has sent wrong bits twice in a row; `causes` are why ranks have lost their group.

        Once may be anybody's memory, and all do it again; whoever does so twice is lost to the others.
        """
        sender = next((rank for cause in causes if (rank := sender_of(cause)) is not None), None)
        if sender is None or sender >= len(self.present.members):
            self._wrong = None
            return None
        before, self._wrong = self._wrong, self.present.members[sender]
        return self._members.index(self._wrong) if before == self._wrong and done <= self._done else None

    def let_go(self, numbers: Collection[int], why: str) -> Generation:
        """The next generation, without these processes, which have handed in what they trained."""
        self.given_up |= {*numbers}
        self.left += tuple(self._members[number] for number in numbers)
        return self.drop(numbers, why)

    def repeat(self, cause: str, done: int) -> Generation:
        """The next generation, of the same members: all of them live, and one has lost its group.

        `done`: the steps or rounds of the furthest one. RankError where this has happened too often without
        one in between.
        """
        self._repeats = self._repeats + 1 if done <= self._done else 1
        self._done = done
        if self._repeats > MOST_REPEATS:
            several = len(self.present.roster.hosts) > 1
            raise RankError(
                f"the ranks have lost each other {self._repeats} times without a step or round in between, though "
                f"all of them run: {cause}"
                + ("; 'uneven preflight' tests the ways between the machines" if several else "")
            )
        return self._publish(self.present.roster, self.present.members, f"{cause}: all ranks start a new group")

    def _publish(self, roster: Roster, members: tuple[str, ...], why: str) -> Generation:
        self.present = Generation(self.present.number + 1, roster, members, why, self.left)
        return self.present


def is_past(status: Mapping[str, Any]) -> bool:
    """Whether this rank has the result of its run, and has begun no other: nobody is needed for that any more."""
    return bool(status.get("is_past"))


def steps_done(status: Mapping[str, Any]) -> int:
    """How far a rank is, by its heartbeat: its steps or, in a local policy, which steps between them, its rounds."""
    return int((status.get("rounds") or {}).get("round", status.get("slot", 0)))


def describe_loss(causes: Sequence[str], statuses: Sequence[Mapping[str, Any]]) -> str:
    """One line for the user: who is lost and why, and what follows; `statuses` are of those who are left."""
    left, lost = len(statuses), "; ".join(causes)
    if all(is_past(status) for status in statuses):
        return f"{lost}: the run had its result already, and {count_ranks(left, 'goes on', 'go on')}"
    known = [int(status["checkpoint"]) for status in statuses if "checkpoint" in status]
    if known:  # shards without a copy
        return f"{lost}: {count_ranks(left, 'goes on', 'go on')} from the checkpoint of step {max(known)}"
    is_local = any(status.get("rounds") for status in statuses)
    since = "round" if is_local else "step"
    whose = "its" if len(causes) == 1 else "their"
    goes_on = f"{count_ranks(left, 'goes on', 'go on')}, {whose} samples since the last {since} are trained again"
    return f"{lost}: {goes_on}"


def count_ranks(count: int, one: str = "is", many: str = "are") -> str:
    return f"1 rank {one}" if count == 1 else f"{count} ranks {many}"
