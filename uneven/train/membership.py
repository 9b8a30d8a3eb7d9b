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

    def to_json(self) -> dict[str, object]:
        return {
            "number": self.number,
            "devices": [str(device) for device in self.roster.devices],
            "machines": list(self.roster.machines),
            "hosts": list(self.roster.hosts),
            "members": list(self.members),
            "why": self.why,
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Generation":
        roster = Roster(parse_devices(found["devices"]), tuple(found["machines"]), tuple(found["hosts"]))
        return cls(int(found["number"]), roster, tuple(found["members"]), str(found["why"]))


class Membership(Protocol):
    """Life cycle: one per run and rank, from the forming of its first group to the run's end."""

    def is_stale(self, number: int) -> bool:
        """Whether a newer generation than this one was announced. From memory, so it may be asked before every step."""
        ...

    def begin(self, facts: dict[str, Any]) -> None:
        """What somebody who joins later must know before it builds its model and axis; told by rank 0, once."""
        ...

    def enter(self) -> Generation:
        """This process joins a run that is on. It is ready, warmed up and measured: the first generation that has it.

        GroupLostError where the run ends before.
        """
        ...

    def await_next(self, number: int, cause: str) -> Generation:
        """The newest generation after this one; tells the leader `cause`, what this rank has seen, and waits.

        GroupLostError with `cause` where none is announced in time (the run cannot go on), or where this member is not
        in it: it was given up as lost, and the others go on with its samples.
        """
        ...

    def form(self, generation: Generation) -> Group:
        """The group of a generation. GroupLostError where a member is lost, or a newer one is announced meanwhile."""
        ...

    def record_store(self) -> Store:
        """The launcher's store under keys of this run, by a connection of its own: for train/round_records.py."""
        ...

    def settled(self, number: int, lines: list[str]) -> None:
        """This rank trains in this generation now; `lines` are for the user."""
        ...

    def finish(self, number: int) -> None:
        """This rank has the run's result: wait until every member of this generation has it.

        GroupLostError where a newer generation is announced before: somebody who is left still needs the others.
        """
        ...
