"""The CPU's model name, topology and bf16 flags, from /proc/cpuinfo and /sys.

ARM kernels report numbers instead of a name. Common ones are decoded here; lscpu decodes others.
"""

import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from uneven.hardware.optional import read_int, read_text

# Implementer and part numbers as in the kernel's arch/arm64/include/asm/cputype.h.
_ARM_PARTS = {
    (0x41, 0xD03): "Cortex-A53",
    (0x41, 0xD05): "Cortex-A55",
    (0x41, 0xD07): "Cortex-A57",
    (0x41, 0xD08): "Cortex-A72",
    (0x41, 0xD0B): "Cortex-A76",
    (0x41, 0xD0C): "Neoverse-N1",
    (0x41, 0xD40): "Neoverse-V1",
    (0x41, 0xD41): "Cortex-A78",
    (0x41, 0xD42): "Cortex-A78AE",
    (0x41, 0xD49): "Neoverse-N2",
    (0x41, 0xD4F): "Neoverse-V2",
    (0x41, 0xD83): "Neoverse-V3AE",
    (0x41, 0xD84): "Neoverse-V3",
    (0x41, 0xD8E): "Neoverse-N3",
    (0xC0, 0xAC3): "Ampere-1",
    (0xC0, 0xAC4): "Ampere-1a",
}
_ARM_MAKERS = {
    0x41: "ARM",
    0x46: "Fujitsu",
    0x48: "HiSilicon",
    0x4E: "NVIDIA",
    0x51: "Qualcomm",
    0x61: "Apple",
    0xC0: "Ampere",
}

# Native bfloat16 arithmetic; without one of these bf16 on a CPU is emulated and slower than fp32.
PRECISION_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")


@dataclass(frozen=True)
class Cpu:
    """The processor. Counts are of the whole machine, not limited to a container."""

    model: str | None
    architecture: str
    sockets: int | None
    cores: int | None
    threads: int | None
    flags: tuple[str, ...]


def _fields(cpuinfo: str) -> dict[str, str]:
    """The first processor's fields."""
    pairs = (line.partition(":") for line in cpuinfo.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs if value.strip()}


def _lscpu_model() -> str | None:
    command = shutil.which("lscpu")
    if command is None:
        return None
    try:
        text = subprocess.run([command], capture_output=True, text=True, timeout=5, check=False).stdout
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    match = re.search(r"^Model name:\s*(\S.*)$", text, re.MULTILINE)
    return match[1].strip() if match and match[1].strip() != "-" else None


def _arm_model(fields: dict[str, str]) -> str | None:
    try:
        maker, part = int(fields["CPU implementer"], 16), int(fields["CPU part"], 16)
    except (KeyError, ValueError):
        return None
    name = _ARM_PARTS.get((maker, part))
    if name is None and maker == 0x61:
        return "Apple"  # one number per core type and generation, so only the maker is reported
    return name


def _model(fields: dict[str, str], root: Path) -> str | None:
    for name in ("model name", "Model", "cpu model", "Hardware"):
        # On x86 the field 'model' is a number.
        if fields.get(name) and not fields[name].isdigit():
            return fields[name]
    model = _arm_model(fields) or (_lscpu_model() if root == Path("/") else None)
    if model is None and "CPU implementer" in fields:
        maker = int(fields["CPU implementer"], 16) if fields["CPU implementer"].startswith("0x") else -1
        model = f"{_ARM_MAKERS.get(maker, 'ARM')} part {fields.get('CPU part', 'unknown')}"
    if model is None and root == Path("/") and platform.system() != "Linux":
        model = platform.processor() or None
    return model


def _topology(cpuinfo: str, root: Path) -> tuple[int | None, int | None, int | None]:
    """(sockets, physical cores, hardware threads)."""
    threads = len(re.findall(r"^processor\s*:", cpuinfo, re.MULTILINE)) or None
    physical: set[tuple[int, int]] = set()  # (socket, core)
    for folder in (root / "sys/devices/system/cpu").glob("cpu[0-9]*"):
        socket = read_int(folder / "topology/physical_package_id")
        core = read_int(folder / "topology/core_id")
        if socket is not None and core is not None:
            physical.add((socket, core))
    if not physical:
        pairs = re.findall(r"^physical id\s*: (\d+)$.*?^core id\s*: (\d+)$", cpuinfo, re.MULTILINE | re.DOTALL)
        physical = {(int(socket), int(core)) for socket, core in pairs}
    if not physical:
        return None, None, threads
    return len({socket for socket, _ in physical}), len(physical), threads


def read_cpu(root: Path = Path("/")) -> Cpu:
    """The CPU of this machine; unknown fields are None."""
    cpuinfo = read_text(root / "proc/cpuinfo") or ""
    fields = _fields(cpuinfo)
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    sockets, cores, threads = _topology(cpuinfo, root)
    return Cpu(
        model=_model(fields, root),
        architecture=platform.machine() or "unknown",
        sockets=sockets,
        cores=cores,
        threads=threads,
        flags=tuple(flag for flag in PRECISION_FLAGS if flag in flags),
    )
