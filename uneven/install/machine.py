"""A machine as far as the choice of a torch depends on it: read here, or from a file that another machine wrote.

The file is what a user attaches to a bug report (`uneven diagnose --record FILE`), and what the tests of the advice are
made of (tests/install/machines). It has no addresses, serial numbers or names of users and machines in it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from uneven.errors import InputError, MachineError
from uneven.hardware.cards import AmdGpu, AmdReport, Card, Nvidia, read_amd, read_cards, read_nvidia
from uneven.hardware.container import Surroundings
from uneven.hardware.cpumodel import Cpu
from uneven.hardware.gpus import Gpu, GpuReport, read_gpus
from uneven.hardware.system import System, read_system
from uneven.hardware.torchbuild import TorchBuild, read_torch
from uneven.install.fields import from_values

FORMAT = "uneven-machine-1"


@dataclass(frozen=True)
class Machine:
    """Everything that `advise` looks at."""

    system: System
    gpus: GpuReport = field(default_factory=GpuReport)
    torch: TorchBuild = field(default_factory=lambda: TorchBuild(installed=False))
    cards: tuple[Card, ...] = ()
    amd: AmdReport = field(default_factory=AmdReport)
    nvidia: Nvidia = field(default_factory=Nvidia)

    def to_json(self) -> dict[str, Any]:
        """Plain values, without what identifies a machine: serial numbers and paths."""
        gpus = tuple(replace(gpu, uuid=None) for gpu in self.gpus.gpus)
        surroundings = self.system.surroundings
        client = "docker" if surroundings.docker_client else None
        system = replace(self.system, surroundings=replace(surroundings, docker_client=client))
        error = self.torch.error.replace(str(Path.home()), "~") if self.torch.error else None
        torch = replace(self.torch, error=error)
        cleaned = replace(self, system=system, gpus=replace(self.gpus, gpus=gpus), torch=torch)
        return {"format": FORMAT, **asdict(cleaned)}


def read_machine(
    system: System | None = None, gpus: GpuReport | None = None, torch: TorchBuild | None = None
) -> Machine:
    """This machine; parts that were read before are passed in. Imports torch where it is installed."""
    return Machine(
        system=system or read_system(),
        gpus=gpus or read_gpus(),
        torch=torch or read_torch(),
        cards=read_cards(),
        amd=read_amd(),
        nvidia=read_nvidia(),
    )


def write_record(machine: Machine, path: Path) -> None:
    """Write the file; MachineError if that is not possible."""
    try:
        path.write_text(json.dumps(machine.to_json(), indent=1) + "\n")
    except OSError as error:
        raise MachineError(f"cannot write {path}: {error.strerror or error}") from error


def read_record(path: Path) -> Machine:
    """The machine that `write_record` wrote; InputError if this is no such file."""
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"--machine {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(f"--machine {path}: this is not JSON ({error})") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise InputError(f"--machine {path}: not a recorded machine; `uneven diagnose --record FILE` writes one")
    try:
        return _machine(values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"--machine {path}: the record is incomplete or wrong ({error})") from error


def _machine(values: Mapping[str, Any]) -> Machine:
    system = dict(values["system"])
    system["cpu"] = from_values(Cpu, system["cpu"])
    system["surroundings"] = from_values(Surroundings, system["surroundings"])
    gpus = dict(values.get("gpus") or {})
    gpus["gpus"] = tuple(from_values(Gpu, gpu) for gpu in gpus.get("gpus", ()))
    amd = dict(values.get("amd") or {})
    amd["gpus"] = tuple(from_values(AmdGpu, gpu) for gpu in amd.get("gpus", ()))
    return Machine(
        system=from_values(System, system),
        gpus=from_values(GpuReport, gpus),
        torch=from_values(TorchBuild, values.get("torch") or {"installed": False}),
        cards=tuple(from_values(Card, card) for card in values.get("cards", ())),
        amd=from_values(AmdReport, amd),
        nvidia=from_values(Nvidia, values.get("nvidia") or {}),
    )
