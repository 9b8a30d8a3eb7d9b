"""The NVIDIA GPUs as the driver lists them, from NVML or else nvidia-smi, or an empty report with the reason.

Never initialises CUDA. The order is the driver's (PCI bus); CUDA may number the GPUs differently, see inventory.py.
"""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from uneven.hardware.optional import or_none


@dataclass(frozen=True)
class Gpu:
    """One GPU; `sm` is its architecture as torch spells it, such as sm_86."""

    index: int
    name: str
    memory_bytes: int | None = None
    sm: str | None = None
    cores: int | None = None
    uuid: str | None = None
    pci: str | None = None
    mig: bool | None = None


@dataclass(frozen=True)
class GpuReport:
    """All GPUs and the driver version; `reason` explains an empty list."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    driver_cuda: str | None = None
    source: Literal["NVML", "nvidia-smi"] | None = None
    reason: str | None = None
    mps_running: bool = False


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _nvml_gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    capability = or_none(lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
    mig = or_none(lambda: bool(nvml.nvmlDeviceGetMigMode(handle)[0]))
    return Gpu(
        index=index,
        name=or_none(lambda: _text(nvml.nvmlDeviceGetName(handle))) or "NVIDIA GPU",
        memory_bytes=or_none(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total)),
        sm=f"sm_{capability[0]}{capability[1]}" if capability else None,
        cores=or_none(lambda: int(nvml.nvmlDeviceGetNumGpuCores(handle))),
        uuid=or_none(lambda: _text(nvml.nvmlDeviceGetUUID(handle))),
        pci=or_none(lambda: _text(nvml.nvmlDeviceGetPciInfo(handle).busId)),
        mig=mig,
    )


def _read_nvml() -> GpuReport:
    try:
        import pynvml
    except ImportError:
        return GpuReport(reason="the NVML binding (nvidia-ml-py) is not installed")
    try:
        pynvml.nvmlInit()
    except Exception as error:
        # By name: a binding that lacks one of these classes must not raise here.
        reasons = {
            "NVMLError_LibraryNotFound": "no NVIDIA driver (libnvidia-ml.so not found)",
            "NVMLError_DriverNotLoaded": "the NVIDIA driver is installed but its kernel module is not loaded",
            "NVMLError_NoPermission": "no permission to talk to the NVIDIA driver",
            "NVMLError_LibRmVersionMismatch": (
                "the NVIDIA driver was updated and the old kernel module still runs: reboot"
            ),
        }
        return GpuReport(reason=reasons.get(type(error).__name__, f"NVML does not start: {error}"))
    try:
        count = or_none(lambda: int(pynvml.nvmlDeviceGetCount())) or 0
        # A GPU that has fallen off the bus raises; the others are still listed.
        gpus = [gpu for index in range(count) if (gpu := or_none(lambda i=index: _nvml_gpu(pynvml, i)))]  # type: ignore[misc]
        number = or_none(lambda: int(pynvml.nvmlSystemGetCudaDriverVersion_v2()))
        return GpuReport(
            gpus=tuple(gpus),
            driver=or_none(lambda: _text(pynvml.nvmlSystemGetDriverVersion())),
            driver_cuda=f"{number // 1000}.{number % 1000 // 10}" if number else None,
            source="NVML",
            reason=None if gpus else "the NVIDIA driver lists no GPU",
        )
    finally:
        or_none(pynvml.nvmlShutdown)


def _run(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, timeout=5, check=False)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def _value(field: str) -> str | None:
    # nvidia-smi writes [N/A], [Not Supported] or [Unknown Error] in place of a value.
    return None if not field or field.startswith("[") or field == "N/A" else field


def _smi_gpu(fields: list[str]) -> Gpu | None:
    index, name, memory, uuid, pci, mig, capability = [*fields, *[""] * 7][:7]
    if not index.isdigit():
        return None
    return Gpu(
        index=int(index),
        name=_value(name) or "NVIDIA GPU",
        memory_bytes=int(memory) * 2**20 if memory.isdigit() else None,
        sm="sm_" + capability.replace(".", "") if re.fullmatch(r"\d+\.\d", capability) else None,
        uuid=_value(uuid),
        pci=_value(pci),
        mig=mig == "Enabled" if _value(mig) else None,
    )


def _read_smi() -> GpuReport:
    # Under WSL nvidia-smi is in this folder, which is not always on PATH.
    command = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/lib/wsl/lib")
    if command is None:
        return GpuReport(reason="nvidia-smi not found")
    fields = "index,name,memory.total,uuid,pci.bus_id,mig.mode.current"
    # compute_cap exists since driver 510, and a query with an unknown field fails as a whole.
    for query in (f"{fields},compute_cap", fields, "index,name,memory.total"):
        text = _run([command, f"--query-gpu={query}", "--format=csv,noheader,nounits"])
        if text is None:
            continue
        rows = [[field.strip() for field in line.split(",")] for line in text.splitlines()]
        gpus = tuple(gpu for row in rows if (gpu := _smi_gpu(row)))
        header = _run([command]) or ""
        driver = re.search(r"Driver Version:\s*([\d.]+)", header)
        cuda = re.search(r"CUDA Version:\s*([\d.]+)", header)
        return GpuReport(
            gpus=gpus,
            driver=driver[1] if driver else None,
            driver_cuda=cuda[1] if cuda else None,
            source="nvidia-smi",
            reason=None if gpus else "nvidia-smi lists no GPU",
        )
    return GpuReport(reason="nvidia-smi fails or does not respond within 5 s")


def _mps_is_running() -> bool:
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")
    return or_none(lambda: (pipes / "control").exists()) or False


def read_gpus() -> GpuReport:
    """All NVIDIA GPUs and the driver, or the reason why there are none; never raises, never initialises CUDA."""
    report = _read_nvml()
    if not report.gpus:
        smi_report = _read_smi()
        if smi_report.gpus:
            report = smi_report
    if not report.gpus:
        return report
    return replace(report, mps_running=_mps_is_running())
