"""The facts of one machine that the machines of a run compare before any of them loads torch.

`collect_facts` reads them, machines/parity.py compares them. Everything is plain JSON, read from package metadata, the
driver and the system: an import of torch takes seconds, and a machine that is refused must not wait for it.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from uneven.hardware.choices import choose_precision, native_precisions
from uneven.hardware.device import Device, parse_devices
from uneven.hardware.gpus import Gpu, GpuReport, read_gpus, usable_devices
from uneven.hardware.system import System, read_system
from uneven.hardware.torchbuild import installed_version
from uneven.machines.code import package_digest
from uneven.version import __version__


def collect_facts(code: Mapping[str, str], devices: Sequence[str]) -> dict[str, Any]:
    """What this machine is and has; `devices` as the user names them, one per rank here, or 'auto' alone.

    `code`: the digests of the script's files (machines/code.py), none without a script.

    'auto' loads torch where the machine has a GPU: which of them torch can use is known to it alone.
    """
    system, report = read_system(), read_gpus()
    found = resolve(devices, report)
    return stamped(
        {
            "host": socket.gethostname() or "unknown",
            "os": system.os_name or system.platform,
            "arch": system.cpu.architecture,
            "python": platform.python_version(),
            "torch": installed_version(),
            "numpy": _version("numpy"),
            "uneven": {"version": __version__, "digest": package_digest()},
            "code": dict(code),
            "cuda": _torch_cuda(),
            "nccl": _nccl_version(),
            "driver": report.driver,
            "devices": [_describe(device, system, _gpu_of(device, report)) for device in found],
            "memory_bytes": system.memory_bytes,
            "memory_available_bytes": system.memory_available_bytes,
            "disk_free_bytes": _free_bytes(Path.cwd()),
        }
    )


def stamped(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts with the clock of this moment: right before they are sent, and where they are received."""
    return {**facts, "clock": time.time()}


def resolve(devices: Sequence[str], report: GpuReport) -> tuple[Device, ...]:
    """The devices that are named; for 'auto' those that torch can use, without torch where there is no GPU."""
    if tuple(devices) != ("auto",):
        return parse_devices(devices)
    is_cpu_build = (installed_version() or "").endswith("+cpu")
    return (Device("cpu"),) if is_cpu_build or not report.gpus else tuple(usable_devices())


def _describe(device: Device, system: System, gpu: Gpu | None) -> dict[str, Any]:
    """One device: what it computes natively, what precision='auto' would choose on it, and why."""
    precision, why = choose_precision(device, system, gpu)
    is_cpu = device.kind == "cpu"
    return {
        "device": str(device),
        "name": (system.cpu.model if is_cpu else gpu.name if gpu is not None else None) or device.kind,
        "precisions": list(native_precisions(device, system, gpu)),
        "auto": precision,
        "why": why,
        "memory_bytes": system.memory_available_bytes if is_cpu else gpu.memory_bytes if gpu is not None else None,
    }


def _gpu_of(device: Device, report: GpuReport) -> Gpu | None:
    """By the driver's index, which is CUDA's where all GPUs are alike or CUDA_DEVICE_ORDER=PCI_BUS_ID."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    numbers = [int(number) for number in visible.split(",")] if re.fullmatch(r"\d+(,\d+)*", visible) else None
    index = device.index or 0
    if numbers is not None:
        index = numbers[index] if index < len(numbers) else -1
    return next((gpu for gpu in report.gpus if device.kind == "cuda" and gpu.index == index), None)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nccl_version() -> str | None:
    """Of the NCCL that torch's wheel brings; None for a build without it, or with one compiled in."""
    return next((found for cuda in ("13", "12", "11") if (found := _version(f"nvidia-nccl-cu{cuda}"))), None)


def _torch_cuda() -> str | None:
    """The CUDA version torch was built for, from its version file."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return None
    match = re.search(r"^cuda\b.*=\s*'([\d.]+)'", text, re.MULTILINE)
    return match[1] if match else None


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
