"""What a new project need not ask, because this machine tells: versions, devices, the image for Docker.

Read without torch, so that a project can be made before torch is installed.
"""

import sys
from dataclasses import dataclass

from uneven.format import format_count
from uneven.hardware.gpus import GpuReport, read_gpus
from uneven.hardware.system import System, read_system
from uneven.hardware.torchbuild import installed_version
from uneven.install import advice
from uneven.version import __version__


@dataclass(frozen=True)
class Machine:
    """Of the machine on which a project is made; `devices` in words, GPUs before the CPU."""

    python: str  # as in 3.11
    executable: str
    torch: str | None
    devices: tuple[str, ...]
    has_gpu: bool
    build: str | None  # of torch, as `uneven setup --build` takes it; None without GPUs, or where none covers them
    advice: str  # how to get a torch for the GPUs, in one line; empty without them

    @property
    def versions(self) -> str:
        torch = "no torch yet" if self.torch is None else f"torch {self.torch}"
        return f"uneven {__version__}, Python {self.python}, {torch}"


def read_machine() -> Machine:
    return describe_machine(read_system(), read_gpus(), installed_version())


def describe_machine(system: System, report: GpuReport, torch: str | None) -> Machine:
    """Pure, for tests with recorded hardware."""
    gpus = tuple(f"{gpu.name}{_memory(gpu.memory_bytes)}" for gpu in report.gpus)
    cores = len(system.available_cores)
    cpu = f"CPU with {format_count(cores, 'core')}{_memory(system.memory_bytes)}"
    advised = advice.advise(advice.Machine(system, report)) if gpus else None
    return Machine(
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        executable=sys.executable,
        torch=torch,
        devices=(*gpus, cpu),
        has_gpu=bool(gpus),
        build=None if advised is None else advised.build,
        advice="" if advised is None else f"{advised.why}: {advised.action}",
    )


def _memory(number: int | None) -> str:
    return "" if number is None else f" ({number / 2**30:.0f} GiB)"
