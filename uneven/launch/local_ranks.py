"""The ranks of this machine: their place among all ranks of a run, and their processes. No torch in this file.

Used by launch/launcher.py where all ranks are here, and by launch/nodes/lead.py and launch/nodes/node.py where each
machine starts its own. A node's launcher never loads torch: its ranks do.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

from uneven.hardware.cores import CorePlan, assign_cores, available_cores, check_count
from uneven.hardware.device import Device, parse_devices
from uneven.hardware.mps import check_slices, oversubscribed, sliced
from uneven.hardware.preflight import check_device
from uneven.hardware.roster import Roster
from uneven.launch.environment import BegunWithout, new_member_id
from uneven.launch.processes import RankProcesses
from uneven.machines.addresses import interface_of

if TYPE_CHECKING:
    from uneven.train.rank_info import Generation  # imports torch


@dataclass(frozen=True)
class RunPlan:
    """All ranks of a run, and which of them are on this machine."""

    roster: Roster
    members: tuple[str, ...]  # one identity per rank
    store: tuple[str, int]
    machine: int = 0
    door: tuple[str, int, str] | None = None  # address, port and token of the leader's door
    address: str | None = None  # this machine's own, where there are several: Gloo and NCCL use its interface alone
    joins: int | None = None  # its ranks join a run in progress: the generation that they were added to
    without: BegunWithout | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.roster.ranks_of(self.machine)

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(self.roster.devices[rank] for rank in self.ranks)

    def to_json(self) -> dict[str, Any]:
        """For a plan, or for a node: which knows the token and its own interface by itself."""
        return {
            **self.roster.to_json(),
            "members": list(self.members),
            "store": list(self.store),
            "machine": self.machine,
            "joins": self.joins,
        }

    @classmethod
    def from_json(
        cls, found: Mapping[str, Any], door: tuple[str, int, str] | None = None, address: str | None = None
    ) -> "RunPlan":
        host, port = found["store"]
        return cls(
            Roster.from_json(found),
            tuple(found["members"]),
            (host, port),
            found["machine"],
            door,
            address,
            found["joins"],
        )


@dataclass(frozen=True)
class Newcomer:
    """A process that was started to join a run: its identity, its device, and its machine's name in the roster."""

    member: str
    device: Device
    host: str


def own_devices(facts: Mapping[str, Any]) -> tuple[Device, ...]:
    """The devices in the facts of this machine; InputError or MachineError where one is not there or cannot train."""
    devices = parse_devices([str(device["device"]) for device in facts["devices"]])
    for device in devices:
        check_device(device)
    check_slices(devices)
    check_count(devices, available_cores())
    return devices


class LocalRanks(RankProcesses):
    """The ranks of this machine. A launcher may start them again one by one (launch/watch/turnover.py)."""

    def __init__(
        self,
        folder: Path,
        placement: RunPlan,
        cores: CorePlan,
        script: Mapping[str, Any] | None,
        variables: Sequence[Mapping[str, str]],
    ) -> None:
        self._placement, self._script = placement, script
        self._places: dict[int, tuple[Device, tuple[int, ...], int]] = {}  # device, cores and threads by process
        self._began_as: dict[int, int] = {}  # the process that had its place at the start, by process
        places = zip(placement.devices, cores.cores, cores.threads, strict=True)
        for number, (rank, place) in enumerate(zip(placement.ranks, places, strict=True)):
            self._places[number], self._began_as[number] = place, number
            self._write_plan(folder, number, placement, rank)
        super().__init__(folder, list(cores.threads), variables)

    def restart(self, lost: int, number: int, present: "Generation") -> Newcomer | None:
        """Start a lost process again, as another member that is to join; None where it is not of this machine."""
        if lost not in self._places:
            return None
        device, host = self._places[lost][0], present.roster.hosts[0]
        member = new_member_id(str(device), None if len(present.roster.hosts) == 1 else host)
        roster, members = present.roster.with_rank(device, host), (*present.members, member)
        self._places[number], self._began_as[number] = self._places[lost], self._began_as[lost]
        plan = replace(self._placement, roster=roster, members=members, joins=present.number)
        self._write_plan(self._folder, number, plan, len(members) - 1)
        self.start_again(number, like=lost)
        self._remove_files(lost)
        return Newcomer(member, device, host)

    def _remove_files(self, number: int) -> None:
        """Of a process that was given up: a long run with many restarts must not fill the shared memory."""
        for name in (f"plan-{number}.json", f"pid-{number}", f"error-{number}.json", f"result-{number}"):
            path = self._folder / name
            rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def _write_plan(self, folder: Path, number: int, placement: RunPlan, rank: int) -> None:
        _, cores, threads = self._places[number]
        plan = {
            **placement.to_json(),
            "rank": rank,
            "door": placement.door,
            "address": placement.address,
            "without": None if placement.without is None else asdict(placement.without),
            "launcher_pid": os.getpid(),
            "cores": cores,
            "threads": threads,
            "began_as": self._began_as[number],
            "script": self._script,
        }
        (folder / f"plan-{number}.json").write_text(json.dumps(plan))


@contextmanager
def local_ranks(
    folder: Path, placement: RunPlan, script: Mapping[str, Any] | None, say: Callable[[list[str]], None]
) -> Iterator[LocalRanks]:
    """Start the ranks of this machine, in a private folder; when the block ends none of them is left."""
    devices = placement.devices
    cores = assign_cores(devices, available_cores())
    say([f"  {note}" for note in (cores.note, oversubscribed(devices)) if note])
    network = interface_variables(placement)
    for name, chosen in network.items():
        if (given := os.environ.get(name, chosen)).removeprefix("=") != chosen.removeprefix("="):
            say([f"  {name}={given} is not used: {chosen.removeprefix('=')} is on the way to the other machines"])
    with sliced(devices) as slices:
        processes = LocalRanks(folder, placement, cores, script, [network | own for own in slices])
        try:
            yield processes
        finally:
            processes.end()


def interface_variables(placement: RunPlan) -> dict[str, str]:
    """Gloo and NCCL stay on the interface that reached the leader, whatever the machine's name resolves to."""
    if placement.address is None:
        return {}
    name = interface_of(placement.address)
    family = "AF_INET6" if ":" in placement.address else "AF_INET"
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}", "NCCL_SOCKET_FAMILY": family}
