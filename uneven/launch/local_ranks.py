"""The ranks of this machine: their place among all ranks of a run, and their processes. No torch in this file.

Used by launch/launcher.py where all ranks are here, and by launch/lead.py and launch/node.py where each machine starts
its own. A node's launcher never loads torch: its ranks do.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uneven.hardware.cores import assign_cores, available_cores, check_count
from uneven.hardware.device import Device, parse_devices
from uneven.hardware.mps import check_slices, oversubscribed, sliced
from uneven.hardware.preflight import check_device
from uneven.hardware.roster import Roster
from uneven.launch.processes import RankProcesses
from uneven.machines.addresses import interface_of


@dataclass(frozen=True)
class RunPlan:
    """All ranks of a run, and which of them are on this machine."""

    roster: Roster
    members: tuple[str, ...]  # one identity per rank
    store: tuple[str, int]
    machine: int = 0
    door: tuple[str, int, str] | None = None  # address, port and token of the leader's door
    address: str | None = None  # this machine's own, where there are several: Gloo and NCCL use its interface alone

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.roster.ranks_of(self.machine)

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(self.roster.devices[rank] for rank in self.ranks)

    def to_json(self) -> dict[str, Any]:
        """For a plan, or for a node: which knows the token and its own interface by itself."""
        return {
            "devices": [str(device) for device in self.roster.devices],
            "machines": list(self.roster.machines),
            "hosts": list(self.roster.hosts),
            "members": list(self.members),
            "store": list(self.store),
            "machine": self.machine,
        }

    @classmethod
    def from_json(
        cls, found: Mapping[str, Any], door: tuple[str, int, str] | None = None, address: str | None = None
    ) -> "RunPlan":
        roster = Roster(parse_devices(found["devices"]), tuple(found["machines"]), tuple(found["hosts"]))
        host, port = found["store"]
        return cls(roster, tuple(found["members"]), (host, port), found["machine"], door, address)


def own_devices(facts: Mapping[str, Any]) -> tuple[Device, ...]:
    """The devices in the facts of this machine; InputError or MachineError where one is not there or cannot train."""
    devices = parse_devices([str(device["device"]) for device in facts["devices"]])
    for device in devices:
        check_device(device)
    check_slices(devices)
    check_count(devices, available_cores())
    return devices


@contextmanager
def local_ranks(
    folder: Path, placement: RunPlan, script: Mapping[str, Any] | None, say: Callable[[list[str]], None]
) -> Iterator[RankProcesses]:
    """Start the ranks of this machine, in a private folder; when the block ends none of them is left."""
    devices = placement.devices
    cores = assign_cores(devices, available_cores())
    say([f"  {note}" for note in (cores.note, oversubscribed(devices)) if note])
    plan = {
        **placement.to_json(),
        "door": placement.door,
        "address": placement.address,
        "launcher_pid": os.getpid(),
        "cores": cores.cores,
        "threads": cores.threads,
        "script": script,
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    network = interface_variables(placement)
    for name, chosen in network.items():
        if (given := os.environ.get(name, chosen)).removeprefix("=") != chosen.removeprefix("="):
            say([f"  {name}={given} is not used: {chosen.removeprefix('=')} is on the way to the other machines"])
    with sliced(devices) as slices:
        processes = RankProcesses(folder, list(cores.threads), [network | own for own in slices])
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
