"""A rank among the others: its identity and group, the interface it reports progress to, and its results.

Where ranks are on several machines, the first one of each reads the clock of rank 0 (MachineClocks): made by
launch/context.py with the group, measured by the worker at the start and the end of a run.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from uneven.comm.clock import Clock, ask_clock, serve_clock
from uneven.comm.group import Group
from uneven.comm.store import Store
from uneven.comm.work import Traffic
from uneven.hardware.device import Device
from uneven.hardware.roster import Roster
from uneven.machines.transfer import LeaderFiles
from uneven.policy.axis import Axis
from uneven.results.state import TrainedState
from uneven.timeline.clock import ClockReading, Machine, read_offset
from uneven.timeline.timeline import Timeline
from uneven.train.round_records import RoundRecords
from uneven.train.state import RunState


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

    def begin_in(self, generation: int) -> None:
        """The generation of ranks with which this run begins."""
        self.generation = generation

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
    read_gone: Callable[[], list[dict[str, Any]]] = list  # lanes of ranks that are gone (elastic/lane_records.py)


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
