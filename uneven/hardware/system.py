"""The machine as one frozen record: CPU, memory, operating system, limits.

read_system never raises: a value that cannot be read is None. The root path is a parameter, so that tests pass fake
trees.
"""

import platform
import re
from dataclasses import dataclass
from pathlib import Path

from uneven.hardware.cgroup import cpu_limit, memory_limit
from uneven.hardware.cores import available_cores
from uneven.hardware.optional import or_none, read_text

# Native bfloat16 arithmetic; without one of these bf16 on a CPU is emulated and slower than fp32.
PRECISION_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")

# Of a machine's memory, what its CPU ranks together count with where bytes are divided by memory: the rest is for data,
# loader processes and host copies of the GPUs beside them.
CPU_PART = 0.25


@dataclass(frozen=True)
class Cpu:
    """The processor; `flags` are those for bf16."""

    model: str | None
    architecture: str
    flags: tuple[str, ...]


@dataclass(frozen=True)
class System:
    """This machine; memory is limited to what a container may use."""

    platform: str
    os_name: str
    kernel: str
    python: str
    cpu: Cpu
    available_cores: tuple[int, ...]
    cpu_quota: float | None
    memory_bytes: int | None
    memory_available_bytes: int | None
    memory_is_limited: bool
    is_container: bool


def read_cpu(root: Path = Path("/")) -> Cpu:
    """The CPU of this machine; ARM kernels report numbers in place of a name."""
    pairs = (line.partition(":") for line in (read_text(root / "proc/cpuinfo") or "").split("\n\n")[0].splitlines())
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    flags = fields.get("flags", fields.get("Features", "")).split()
    return Cpu(
        model=fields.get("model name"),
        architecture=platform.machine() or "unknown",
        flags=tuple(flag for flag in PRECISION_FLAGS if flag in flags),
    )


def read_memory(root: Path = Path("/")) -> tuple[int | None, int | None, bool]:
    """(total, available, limited by a cgroup), in bytes."""
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB$", read_text(root / "proc/meminfo") or "", re.MULTILINE))
    total = int(fields["MemTotal"]) * 1024 if "MemTotal" in fields else None
    available = int(fields["MemAvailable"]) * 1024 if "MemAvailable" in fields else None
    limit, free = memory_limit(root)
    is_limited = limit is not None and (total is None or limit < total)
    if is_limited:
        total = limit
        available = free if available is None else available if free is None else min(available, free)
    return total, available, is_limited


def is_container(root: Path = Path("/")) -> bool:
    """Whether this process runs in a container of Docker, Podman or Kubernetes."""
    signs = (".dockerenv", "run/.containerenv", "var/run/secrets/kubernetes.io")
    return any((root / sign).exists() for sign in signs)


def read_system(root: Path = Path("/")) -> System:
    """All facts about this machine except GPUs, network and torch."""
    total, available, is_limited = read_memory(root)
    release = or_none(platform.freedesktop_os_release) or {}
    return System(
        platform=platform.system(),
        os_name=release.get("PRETTY_NAME") or f"{platform.system()} {platform.release()}",
        kernel=platform.release(),
        python=platform.python_version(),
        cpu=read_cpu(root),
        available_cores=available_cores(root),
        cpu_quota=cpu_limit(root),
        memory_bytes=total,
        memory_available_bytes=available,
        memory_is_limited=is_limited,
        is_container=is_container(root),
    )
