"""A rank among the others: who trains together, its identity and group, what it reports, and its results.

The leader (the process with the rendezvous store) numbers the rosters of a run: each is a *generation*. A rank that is
lost, leaves or joins makes a new one, also while the ranks still settle on the last. Nothing is retried under an old
number: its group is given up, with everything that was in flight. Membership is the contract between the worker and
launch/membership.py.

RoundRecords is what each rank has handed in, round by round, in the launcher's store: there it outlives the rank.
Before a rank sends its params for a round, its averaging thread writes down which parts are in them, and waits until
the store has it. So for every round that counts (policy/lineage.py) the store knows every rank's parts, in order, also
those of a rank that is gone. Without a Membership nobody goes on after a loss, and nothing is written. Each rank has
CHUNK keys that it uses in turn. Before it uses them again, what they hold is written as one compressed chunk: a record
under a key of its own took the store 294 bytes instead of 47, and there is one for each rank and round.

Where ranks are on several machines, the first one of each reads the clock of rank 0 (MachineClocks): made by
launch/context.py with the group, measured by the worker at the start and the end of a run.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from uneven.comm.clock import Clock, ask_clock, serve_clock
from uneven.comm.group import Group
from uneven.comm.store import Store
from uneven.comm.work import Traffic
from uneven.hardware.device import Device, parse_devices
from uneven.hardware.roster import Roster
from uneven.machines.transfer import LeaderFiles
from uneven.policy.axis import Axis
from uneven.policy.lineage import Era, Part, decode, encode
from uneven.policy.recorded import Round
from uneven.results.state import TrainedState
from uneven.timeline.clock import ClockReading, Machine, read_offset
from uneven.timeline.timeline import Timeline
from uneven.train.state import RunState


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
        """The launcher's store under keys of this run, by a connection of its own: for RoundRecords."""
        ...

    def settled(self, number: int, lines: list[str]) -> None:
        """This rank trains in this generation now; `lines` are for the user."""
        ...

    def finish(self, number: int) -> None:
        """This rank has the run's result: wait until every member of this generation has it.

        GroupLostError where a newer generation is announced before: somebody who is left still needs the others.
        """
        ...


PARTING = "a rank leaves"

CHUNK = 16  # records; so many stay uncompressed of each rank that is lost


class RoundRecords:
    """Life cycle: one per rank and run, with a client of the store that nobody else waits on. Used by one thread."""

    def __init__(self, store: Store, member: str) -> None:
        self._store, self._member = store, member
        self._recent: list[dict[str, Any]] = []  # since the last chunk
        self._chunks = 0

    def write(
        self,
        generation: int,
        number: int,
        parts: Iterable[Part],
        dropped: Iterable[Part],
        about: Round,
        last: Round | None = None,
    ) -> None:
        """Before round `number` of a generation, counted from 1: the parts that this rank adds to its average.

        `about` is the round as this rank knows it so far: its slot, its parts when it entered, those when it merged
        the round before, and the factor on its learning rates since. `last` is the one that it has merged before.
        """
        if len(self._recent) == CHUNK:
            # Bytes are taken as they are; the stub knows only str.
            packed: Any = zlib.compress(json.dumps(self._recent).encode())
            self._store.set(_chunk_key(self._chunks, self._member), packed)
            self._recent, self._chunks = [], self._chunks + 1
        key = _key(len(self._recent), self._member)
        record = {"at": [generation, number], "parts": encode(parts), "dropped": encode(dropped), "round": list(about)}
        record |= {} if last is None else {"last": list(last)}
        self._recent.append(record)
        self._store.set(key, json.dumps(record))
        self._store.check([key])  # a client sends and goes on: the answer says that the store has it

    def read(self, lineage: Sequence[Era], member: str) -> dict[str, Any]:
        """All that a member has handed in: `log`, `dropped` and `rounds` as in its results.

        When it merged its last round is not known, and does not matter: nothing that it trained since counts.
        """
        written = self._written(member)
        found = [
            written[era.generation, number]
            for place, era in enumerate(lineage)
            if member in era.members
            for number in range(0 if place == 0 else 1, era.rounds + 1)
        ]
        return {
            "member": member,
            "log": decode(run for record in found for run in record["parts"]),
            "dropped": decode(run for record in found for run in record["dropped"]),
            "rounds": [*(record.get("last", record["round"]) for record in found[1:]), *_last_round(found)],
        }

    def _written(self, member: str) -> dict[tuple[int, int], dict[str, Any]]:
        """By generation and number. A key that the member has not used again holds what is in the last chunk, too."""
        records: list[dict[str, Any]] = []
        number = 0
        while self._store.check([_chunk_key(number, member)]):
            records += json.loads(zlib.decompress(self._store.get(_chunk_key(number, member))))
            number += 1
        keys = [key for key in (_key(place, member) for place in range(CHUNK)) if self._store.check([key])]
        records += [json.loads(data) for data in self._store.multi_get(keys)] if keys else []
        return {(record["at"][0], record["at"][1]): record for record in records}


def _last_round(found: Sequence[dict[str, Any]]) -> list[list[float]]:
    """Of a member that is gone: as if it had merged it at once."""
    return [[due, entered, entered, scale] for due, entered, _, scale in (record["round"] for record in found[-1:])]


def _key(place: int, member: str) -> str:
    return f"parts/{place}/{member}"


def _chunk_key(number: int, member: str) -> str:
    return f"parts/chunk-{number}/{member}"


class Report(Protocol):
    """Receives the run's progress. Called on the thread that trains, so each call must return quickly."""

    def started(self, axis: Axis, place: str) -> None: ...
    def stepped(self, samples: int, own_samples: int, training_s: float, loss: float | None) -> None: ...
    def epoch_done(self, entry: dict[str, Any]) -> None: ...
    def say(self, lines: Sequence[str]) -> None:
        """Lines for the user."""
        ...


class RankInfo:
    """Who this process is among the ranks of a run.

    The one object that holds rank, devices and group: readers ask it each time and keep no copy, because all three
    change when machines join or leave. `member` is the identity that stays when the rank changes; `generation` counts
    the groups that this member has trained in.
    """

    def __init__(
        self,
        rank: int,
        devices: Sequence[Device],
        *,
        roster: Roster | None = None,
        member: str | None = None,
        leader: LeaderFiles | None = None,
        is_newcomer: bool = False,
    ) -> None:
        """`roster` says on which machines the devices are; without one they are all on this machine.

        `leader` reaches rank 0's folders from other machines, where the run has a leader that serves them.
        """
        self.rank = rank
        self.devices = tuple(devices)  # of all ranks, in rank order
        self.roster = roster or Roster.on_one_machine(self.devices)
        assert self.roster.devices == self.devices, "the roster of these very ranks"
        self.member = f"{self.devices[rank]}#{rank}" if member is None else member
        self.generation = 0
        self._begins_because = ""
        self.is_newcomer = is_newcomer  # it joins a run in progress, and has trained nothing in it yet
        self.leader = leader
        self.records: RoundRecords | None = None  # with a Membership
        self.clocks: MachineClocks | None = None  # with the group, where ranks are on several machines
        self._group: Group | None = None

    @property
    def device(self) -> Device:
        return self.devices[self.rank]

    @property
    def world_size(self) -> int:
        return len(self.devices)

    @property
    def is_with_first(self) -> bool:
        """Whether this rank is on the machine of rank 0, which writes the results."""
        return self.roster.machines[self.rank] == self.roster.machines[0]

    @property
    def places(self) -> tuple[str, ...]:
        """How messages name each rank: with its host, where there are several."""
        if self.roster.is_one_machine:
            return tuple(f"rank {rank}" for rank in range(self.world_size))
        return tuple(f"rank {rank} on {self.roster.host(rank)}" for rank in range(self.world_size))

    @property
    def has_cuda(self) -> bool:
        """Whether any rank of the group trains on a CUDA device."""
        return any(device.kind == "cuda" for device in self.devices)

    @property
    def segment(self) -> dict[str, Any]:
        """For the segment that a run begins with: its devices, and why there are no more of them."""
        why = {"why": self._begins_because} if self._begins_because else {}
        return {"devices": [str(device) for device in self.devices], **why}

    @property
    def group(self) -> Group:
        assert self._group is not None, "the group forms after the warm-up"
        return self._group

    @property
    def machine(self) -> Machine:
        """The machine of this rank, with what this rank has read of the clocks."""
        readings = () if self.clocks is None else tuple(self.clocks.readings)
        return Machine(self.roster.machines[self.rank], self.roster.host(self.rank), readings)

    @property
    def place(self) -> dict[str, Any]:
        """Which machine this rank is on, for its status; nothing where there is one machine."""
        if self.roster.is_one_machine:
            return {}
        return {"machine": self.roster.machines[self.rank], "host": self.roster.host(self.rank)}

    def compare_clocks(self, clock: Clock) -> None:
        """Read the clocks of several machines; called on all ranks, at the start and at the end of a run."""
        if self.clocks is not None:
            self.clocks.measure(self.group, clock)

    @property
    def awaited(self) -> str | None:
        """The collective that this rank waits for at this moment; read from another thread, also before there is a
        group.
        """
        work = None if self._group is None else self._group.traffic.awaited
        return None if work is None else work.describe()

    def join(self, group: Group) -> None:
        """From now on collectives go through this group."""
        assert (group.rank, group.world_size) == (self.rank, self.world_size), "the group of these very ranks"
        self._group = group

    def go_on_as(self, generation: int, roster: Roster, rank: int, group: Group) -> None:
        """This member goes on as `rank` of another roster, whose group has formed; clocks are compared anew."""
        self.generation = generation
        self.roster = roster
        self.rank = rank
        self.devices = roster.devices
        self.clocks = None
        self.join(group)

    def begin_in(self, generation: int, why: str) -> None:
        """The generation of ranks with which this run begins; `why`: who was lost before its first step, or empty."""
        self.generation, self._begins_because = generation, why

    def read_clocks(self, store: Store) -> None:
        """Ranks are on several machines: from now on their clocks are compared through this store."""
        self.clocks = MachineClocks(store, self.roster, self.rank)

    def keep_records(self, records: RoundRecords) -> None:
        """What this rank hands in is written down there, from now on."""
        self.records = records

    def has_settled(self) -> None:
        self.is_newcomer = False


@dataclass(frozen=True)
class RankResult:
    """A finished rank's results: `log` holds (slot, first, samples) of every part it trained, in order.

    `dropped` holds those that were not finite and changed nothing, `rounds` (due, entered, merged, scale) of each
    round of a local policy, in parts trained by this rank.
    """

    state: TrainedState
    timeline: Timeline
    log: list[tuple[int, int, int]]
    rounds: Sequence[tuple[int, int, int, float]]
    traffic: Traffic
    dropped: list[tuple[int, int, int]]
    run: RunState  # history, saves and segments of the whole run
    member: str | None = None  # this rank's name, where ranks may be lost or join
    read_gone: Callable[[], list[dict[str, Any]]] = list  # lanes of ranks that are gone (LaneRecords in settler.py)


class MachineClocks:
    """Life cycle: one per group and rank; `measure` on all ranks, as a collective.

    `store` is used by this object alone. `readings` stay empty on every rank but the first of each further machine.
    """

    def __init__(self, store: Store, roster: Roster, rank: int) -> None:
        self._store = store
        self._roster = roster
        self._rank = rank
        self.readings: list[ClockReading] = []
        self._measured = 0

    def measure(self, group: Group, clock: Clock) -> None:
        """Rank 0 serves one machine after the other. A store that is gone costs a reading, not the run's results."""
        self._measured += 1
        group.all_reduce(torch.zeros(1)).wait()  # a rank may write its last checkpoint for longer than a store waits
        with suppress(RuntimeError):
            for machine in range(1, len(self._roster.hosts)):
                name = f"{self._measured}/{machine}"
                if self._rank == 0:
                    serve_clock(self._store, name, clock)
                elif self._rank == self._roster.ranks_of(machine)[0]:
                    self.readings.append(read_offset(ask_clock(self._store, name, clock)))
