"""Who trains together, as a rank learns it: the contract between the worker and launch/membership.py.

The leader (the process with the rendezvous store) numbers the rosters of a run: each is a *generation*. A rank that is
lost, leaves or joins makes a new one, also while the ranks still settle on the last. Nothing is retried under an old
number: its group is given up, with everything that was in flight.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from uneven.comm.group import Group
from uneven.comm.store import Store
from uneven.hardware.device import parse_devices
from uneven.hardware.roster import Roster


@dataclass(frozen=True)
class Generation:
    """A roster with its number, as the leader announced it. The run starts with generation 0."""

    number: int
    roster: Roster
    members: tuple[str, ...]  # one identity per rank, in rank order; an identity is never used again
    why: str = ""  # one line for the user: who has left or joined, and why
    left: tuple[str, ...] = ()  # members of earlier ones that have left on purpose, and had handed in everything

    def to_json(self) -> dict[str, object]:
        return {
            "number": self.number,
            "devices": [str(device) for device in self.roster.devices],
            "machines": list(self.roster.machines),
            "hosts": list(self.roster.hosts),
            "members": list(self.members),
            "why": self.why,
            "left": list(self.left),
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Generation":
        roster = Roster(parse_devices(found["devices"]), tuple(found["machines"]), tuple(found["hosts"]))
        left = tuple(found.get("left", ()))
        return cls(int(found["number"]), roster, tuple(found["members"]), str(found["why"]), left)


class Membership(Protocol):
    """Life cycle: one per run and rank, from the forming of its first group to the run's end."""

    def is_stale(self, number: int) -> bool:
        """Whether a newer generation than this one was announced. From memory, so it may be asked before every step."""
        ...

    def begin(self, facts: dict[str, Any]) -> None:
        """What somebody who joins later must know before it builds its model and axis; told by rank 0, once."""
        ...

    def defer_joins(self, members: tuple[str, ...]) -> None:
        """From now on a generation that only adds to these members, or to those after them, waits for `let_in`."""
        ...

    @property
    def deferred(self) -> int:
        """The number of the generation that waits; 0 where none does."""
        ...

    def let_in(self) -> None:
        """The generation that waits, if there is one, counts as announced."""
        ...

    def enter(self) -> Generation:
        """This process joins a run in progress. It is ready, warmed up and measured: the first generation that has it.

        GroupLostError where the run ends before.
        """
        ...

    def await_next(self, number: int, cause: str) -> Generation:
        """The newest generation after this one; tells the leader `cause`, what this rank has seen, and waits.

        GroupLostError with `cause` where none is announced in time (the run cannot go on), or where this member is not
        in it: it was given up as lost, and the others go on with its samples.
        """
        ...

    def is_leaving(self) -> bool:
        """Whether this rank was asked to leave. From memory, so it may be asked before every step."""
        ...

    def must_leave(self) -> bool:
        """The same, as the leader has it now."""
        ...

    def leave(self, number: int, samples: int) -> Generation:
        """All that this rank has trained, so many samples, is with the others: tell the leader, and go (errors.Left).

        Returns the next generation where it has this member: somebody was lost at the same moment, or it is to stay.
        """
        ...

    def form(self, generation: Generation, *, is_own_loop: bool = False) -> Group:
        """The group of a generation. GroupLostError where a member is lost, or a newer one is announced meanwhile.

        Members may be in an evaluation, a callback or a checkpoint, and come when that ends, however long it takes.
        `is_own_loop`: or in code of the user's own, and where others join, in the steps of an epoch that goes on.
        """
        ...

    def record_store(self) -> Store:
        """The launcher's store under keys of this run, by a connection of its own: for round_records.py."""
        ...

    def settled(self, number: int, lines: list[str]) -> None:
        """This rank trains in this generation now; `lines` are for the user."""
        ...

    def finish(self, number: int) -> None:
        """This rank has the run's result: wait until every member of this generation has it.

        GroupLostError where a newer generation is announced before: somebody who is left still needs the others.
        """
        ...
