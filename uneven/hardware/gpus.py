"""The NVIDIA GPUs of this machine, as the driver lists them; CUDA is never initialised here.

NVML first, nvidia-smi second, and else an empty report with the reason. The order is the driver's (PCI bus);
CUDA may number them otherwise, see inventory.py.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

_T = TypeVar("_T")


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
    """All GPUs and the driver; `reason` says why there are none."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    driver_cuda: str | None = None
    source: str | None = None
    reason: str | None = None
    mps_running: bool = False


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _try(call: Callable[[], _T]) -> _T | None:
    """None for what this driver, GPU or version of the binding does not offer."""
    try:
        return call()
    except Exception:  # NVMLError, AttributeError of an old binding, ctypes errors
        return None


def _nvml_gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    capability = _try(lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
    mig = _try(lambda: bool(nvml.nvmlDeviceGetMigMode(handle)[0]))
    return Gpu(
        index=index,
        name=_try(lambda: _text(nvml.nvmlDeviceGetName(handle))) or "NVIDIA GPU",
        memory_bytes=_try(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total)),
        sm=f"sm_{capability[0]}{capability[1]}" if capability else None,
        cores=_try(lambda: int(nvml.nvmlDeviceGetNumGpuCores(handle))),
        uuid=_try(lambda: _text(nvml.nvmlDeviceGetUUID(handle))),
        pci=_try(lambda: _text(nvml.nvmlDeviceGetPciInfo(handle).busId)),
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
        count = _try(lambda: int(pynvml.nvmlDeviceGetCount())) or 0
        # A GPU that has fallen off the bus raises; the others are still listed.
        gpus = [gpu for index in range(count) if (gpu := _try(lambda i=index: _nvml_gpu(pynvml, i)))]  # type: ignore[misc]
        number = _try(lambda: int(pynvml.nvmlSystemGetCudaDriverVersion_v2()))
        return GpuReport(
            gpus=tuple(gpus),
            driver=_try(lambda: _text(pynvml.nvmlSystemGetDriverVersion())),
            driver_cuda=f"{number // 1000}.{number % 1000 // 10}" if number else None,
            source="NVML",
            reason=None if gpus else "the NVIDIA driver lists no GPU",
        )
    finally:
        _try(pynvml.nvmlShutdown)


def _run(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, timeout=5, check=False)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def _known(field: str) -> str | None:
    # nvidia-smi writes [N/A], [Not Supported] or [Unknown Error] in place of a value.
    return None if not field or field.startswith("[") or field == "N/A" else field


def _smi_gpu(fields: list[str]) -> Gpu | None:
    index, name, memory, uuid, pci, mig, capability = [*fields, *[""] * 7][:7]
    if not index.isdigit():
        return None
    return Gpu(
        index=int(index),
        name=_known(name) or "NVIDIA GPU",
        memory_bytes=int(memory) * 2**20 if memory.isdigit() else None,
        sm="sm_" + capability.replace(".", "") if re.fullmatch(r"\d+\.\d", capability) else None,
        uuid=_known(uuid),
        pci=_known(pci),
        mig=mig == "Enabled" if _known(mig) else None,
    )


def _read_smi() -> GpuReport:
    # Under WSL the tools lie here and the folder is not always on PATH.
    command = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/lib/wsl/lib")
    if command is None:
        return GpuReport(reason="nvidia-smi not found")
    known = "index,name,memory.total,uuid,pci.bus_id,mig.mode.current"
    # compute_cap came with driver 510 and a query with one unknown field fails as a whole.
    for query in (f"{known},compute_cap", known, "index,name,memory.total"):
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
    return GpuReport(reason="nvidia-smi is there but fails or does not answer within 5 s")


def _mps_is_running() -> bool:
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")
    return _try(lambda: (pipes / "control").exists()) or False


def read_gpus() -> GpuReport:
    """Every NVIDIA GPU with its driver, or the reason why there is none; never raises, never starts CUDA."""
    report = _read_nvml()
    if not report.gpus:
        second = _read_smi()
        if second.gpus:
            report = second
    if not report.gpus:
        return report
    return replace(report, mps_running=_mps_is_running())
