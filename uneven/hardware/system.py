"""The machine as one frozen record: CPU, memory, operating system, container.

read_system never raises: a value that cannot be read is None. The root path and the environment are parameters, so that
tests pass fake trees.
"""

import os
import platform
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from uneven.hardware.cgroup import cpu_limit, memory_limit
from uneven.hardware.container import Surroundings, read_surroundings
from uneven.hardware.cores import available_cores
from uneven.hardware.cpumodel import Cpu, read_cpu
from uneven.hardware.optional import read_text


@dataclass(frozen=True)
class System:
    """This machine; memory is limited to what a container may use."""

    platform: str
    os_name: str | None
    kernel: str | None
    python: str
    cpu: Cpu
    available_cores: tuple[int, ...]
    cpu_quota: float | None
    memory_bytes: int | None
    memory_available_bytes: int | None
    memory_is_limited: bool
    surroundings: Surroundings

    @property
    def is_linux(self) -> bool:
        return self.platform == "Linux"


def _os_name(root: Path, system: str) -> str | None:
    if system == "Darwin":
        return f"macOS {platform.mac_ver()[0]}".strip()
    if system != "Linux":
        return f"{system} {platform.release()}".strip() or None
    text = read_text(root / "etc/os-release") or read_text(root / "usr/lib/os-release") or ""
    for name in ("PRETTY_NAME", "NAME"):
        match = re.search(rf"^{name}=(.*)$", text, re.MULTILINE)
        if match:
            try:
                return " ".join(shlex.split(match[1])) or None
            except ValueError:  # an unclosed quote
                return match[1].strip("\"'") or None
    return None


def _memory_without_proc() -> tuple[int | None, int | None]:
    try:
        import psutil

        memory = psutil.virtual_memory()
        return int(memory.total), int(memory.available)
    except Exception:  # psutil may be missing, or its platform call may fail in any way
        return None, None


def read_memory(root: Path = Path("/")) -> tuple[int | None, int | None, bool]:
    """(total, available, limited by a cgroup), in bytes."""
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB$", read_text(root / "proc/meminfo") or "", re.MULTILINE))
    total = int(fields["MemTotal"]) * 1024 if "MemTotal" in fields else None
    available = int(fields["MemAvailable"]) * 1024 if "MemAvailable" in fields else None
    if total is None and root == Path("/"):
        total, available = _memory_without_proc()
    limit, free = memory_limit(root)
    is_limited = limit is not None and (total is None or limit < total)
    if is_limited:
        total = limit
        available = free if available is None else available if free is None else min(available, free)
    return total, available, is_limited


def read_system(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> System:
    """All facts about this machine except GPUs, network and torch."""
    # A fake tree is always that of a Linux machine.
    system = platform.system() if root == Path("/") else "Linux"
    total, available, is_limited = read_memory(root)
    kernel = (read_text(root / "proc/sys/kernel/osrelease") or "").strip()
    return System(
        platform=system,
        os_name=_os_name(root, system),
        kernel=kernel or (platform.release() if root == Path("/") else None),
        python=platform.python_version(),
        cpu=read_cpu(root),
        available_cores=available_cores(root),
        cpu_quota=cpu_limit(root),
        memory_bytes=total,
        memory_available_bytes=available,
        memory_is_limited=is_limited,
        surroundings=read_surroundings(root, environ),
    )
