"""Who reads whose clock where ranks are on several machines: the first rank of each machine that of rank 0.

Made by launch/context.py with the group, kept by RankInfo, measured by the worker at the start and the end of a run.
"""

from contextlib import suppress

import torch

from uneven.comm.clock import Clock, ask_clock, serve_clock
from uneven.comm.group import Group
from uneven.comm.store import Store
from uneven.hardware.roster import Roster
from uneven.timeline.clock import ClockReading, read_offset


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
