"""Who is where, from the facts that the ranks have told each other: machines and devices.

For ranks that another launcher started. Pure functions of the facts, which all ranks hold alike, so all come to the
same roster; `read_facts` looks at this process, `take_cores` pins it. Used by launch/context.py.
"""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uneven.errors import InputError
from uneven.hardware.cores import assign_cores, available_cores, pin
from uneven.hardware.device import Device, parse_devices
from uneven.hardware.gpus import read_gpus, read_visible, why_unusable
from uneven.hardware.network import own_name_resolves_to, source_address
from uneven.hardware.optional import read_text
from uneven.hardware.roster import Roster
from uneven.hardware.torchbuild import read_torch
from uneven.launch.environment import LaunchEnvironment
from uneven.machines.addresses import unique_labels

Facts = dict[str, Any]  # of one rank


def machine_identity(root: Path = Path("/")) -> str:
    """Equal for processes that share loopback and shared memory, and for no others, whatever their hostnames.

    Containers of one machine have its boot id, but a network or a /dev/shm of their own.
    """
    boot = (read_text(root / "proc/sys/kernel/random/boot_id") or read_text(root / "etc/machine-id") or "").strip()
    try:
        network = os.readlink(root / "proc/self/ns/net")
    except OSError:
        network = ""
    try:
        memory = str((root / "dev/shm").stat().st_dev)
    except OSError:
        memory = ""
    return "/".join([boot or socket.gethostname(), network, memory])


def read_facts(environment: LaunchEnvironment) -> Facts:
    """What the other ranks need to know of this one; `environment` has the numeric address of the store."""
    build = read_torch()
    visible = read_visible(build, read_gpus())
    usable = [gpu for gpu in visible.gpus if why_unusable(gpu, build) is None]
    return {
        "host": socket.gethostname(),
        "machine": machine_identity(),
        "local_rank": environment.local_rank,
        "address": source_address(environment.host) or "" if environment.host else "",
        "name": own_name_resolves_to(),
        "gpus": [[gpu.index, gpu.uuid or str(gpu.index)] for gpu in usable],
        "cores": list(available_cores()),
        "gloo": os.environ.get("GLOO_SOCKET_IFNAME", ""),
    }


@dataclass(frozen=True)
class Placement:
    """The ranks of one attempt, by their facts in rank order."""

    facts: tuple[Facts, ...]

    @property
    def machines(self) -> tuple[int, ...]:
        numbers: dict[str, int] = {}
        return tuple(numbers.setdefault(str(fact["machine"]), len(numbers)) for fact in self.facts)

    @property
    def hosts(self) -> tuple[str, ...]:
        """A name per machine."""
        first = dict(reversed([*zip(self.machines, self.facts, strict=True)]))
        return unique_labels([str(first[machine]["host"]) for machine in sorted(first)])

    def roster(self, devices: Sequence[Device]) -> Roster:
        return Roster(tuple(devices), self.machines, self.hosts)

    def auto_devices(self) -> tuple[Device, ...]:
        """A GPU of its own for every rank of a machine where there are enough, else the cpu for all of them.

        A rank sees all GPUs of its machine, or those alone that Slurm gave to it: indices say nothing, identities do.
        """
        devices = [Device("cpu")] * len(self.facts)
        for machine in range(len(self.hosts)):
            ranks = [rank for rank, place in enumerate(self.machines) if place == machine]
            taken: dict[int, tuple[int, str]] = {}
            for rank in ranks:
                used = {uuid for _, uuid in taken.values()}
                free = ((index, uuid) for index, uuid in self.facts[rank]["gpus"] if uuid not in used)
                if (found := next(free, None)) is not None:
                    taken[rank] = found
            if len(taken) == len(ranks):
                for rank, (index, _) in taken.items():
                    devices[rank] = Device("cuda", index)
        return tuple(devices)

    def is_crowded(self, devices: Sequence[Device]) -> bool:
        """Whether two ranks of any machine have the same GPU."""
        gpus = []
        for machine, device, fact in zip(self.machines, devices, self.facts, strict=True):
            if device.kind == "cuda":
                names = dict(fact["gpus"])
                gpus.append((machine, names.get(device.index, device.index)))
        return len(set(gpus)) < len(gpus)

    def sharing_cores(self, rank: int) -> tuple[int, ...]:
        """The ranks of this rank's machine that may use the same cores as it; Slurm may have given each its own."""
        own = self.facts[rank]
        return tuple(
            other
            for other, fact in enumerate(self.facts)
            if fact["machine"] == own["machine"] and fact["cores"] == own["cores"]
        )


def name_devices(setting: str, environment: LaunchEnvironment) -> tuple[Device, ...]:
    """The devices that the user named, one per rank; InputError where they do not fit the processes that there are."""
    devices = parse_devices(setting)
    launcher, world_size = environment.launcher, environment.world_size
    if any(device.percent is not None for device in devices):
        names = ",".join(device.torch_name for device in devices)
        raise InputError(
            f"devices={setting!r}: {launcher} has started this process already, which is too late for a slice; set "
            "CUDA_MPS_PIPE_DIRECTORY and CUDA_MPS_ACTIVE_THREAD_PERCENTAGE for each process yourself and pass "
            f"{names!r}, or start the script by: uneven run --devices {setting}"
        )
    if len(devices) != world_size:
        raise InputError(
            f"devices={setting!r} names {len(devices)} for the {world_size} processes that {launcher} started; name "
            f"{world_size}, in the order of ranks, leave devices='auto', or start {len(devices)} processes"
        )
    return devices


def take_cores(placement: Placement, rank: int, devices: Sequence[Device]) -> list[str]:
    """Pin this process to its share of the cores that it has together with others; returns lines for the user."""
    import torch

    ranks = placement.sharing_cores(rank)
    plan = assign_cores([devices[other] for other in ranks], available_cores())
    pin(plan.cores[ranks.index(rank)])
    torch.set_num_threads(plan.threads[ranks.index(rank)])
    return [f"  {plan.note}"] if plan.note else []
