"""The NVIDIA GPUs: as the driver lists them, and with CUDA's indices as torch does; and the devices of "auto".

The driver (NVML) lists GPUs by PCI bus. CUDA numbers the fastest first and hides GPUs that are not in
CUDA_VISIBLE_DEVICES. `cuda:1` uses CUDA's index, so torch is queried where possible, and both lists are joined by UUID.
"""

import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from uneven.hardware.device import Device
from uneven.hardware.optional import or_none, read_text
from uneven.hardware.torchbuild import Support, TorchBuild, arch_support, read_torch


@dataclass(frozen=True)
class Gpu:
    """One GPU; `sm` is its architecture as torch spells it, such as sm_86."""

    index: int
    name: str
    memory_bytes: int | None = None
    sm: str | None = None
    cores: int | None = None
    uuid: str | None = None
    mig: bool | None = None


@dataclass(frozen=True)
class GpuReport:
    """All GPUs and the driver version; `reason` explains an empty list."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    driver_cuda: str | None = None
    reason: str | None = None


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
        mig=mig,
    )


def read_gpus() -> GpuReport:
    """All NVIDIA GPUs and the driver, or the reason why there are none; never raises, never initialises CUDA."""
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
            reason=None if gpus else "the NVIDIA driver lists no GPU",
        )
    finally:
        or_none(pynvml.nvmlShutdown)


def has_nvidia_card(root: Path = Path("/")) -> bool:
    """Whether a graphics card of NVIDIA is on the PCI bus, with a driver or without; also seen in most containers."""
    devices = (root / "sys/bus/pci/devices").glob("*")
    return any(
        (read_text(folder / "vendor") or "").startswith("0x10de")
        and (read_text(folder / "class") or "").startswith("0x03")  # display controllers
        for folder in devices
    )


@dataclass(frozen=True)
class VisibleGpus:
    """The GPUs that this process can see, with CUDA's indices; `error` explains an empty list."""

    gpus: tuple[Gpu, ...] = ()
    error: str | None = None


def read_visible(build: TorchBuild, report: GpuReport) -> VisibleGpus:
    """Query torch for its CUDA devices; this initialises CUDA in this process but creates no context on a GPU."""
    if not build.installed or build.version is None:
        return VisibleGpus(error="torch is not installed" if not build.installed else "torch does not import")
    if build.is_cpu_build:
        return VisibleGpus(error=f"torch {build.version} is a CPU build")
    try:
        import torch

        # torch warns about GPUs it was not compiled for; our report names them with the command to run.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            all_properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    except Exception as error:  # driver too old, GPU lost, no permission
        first_line = [*str(error).strip().splitlines(), type(error).__name__][0]
        return VisibleGpus(error=f"CUDA does not start: {first_line}")
    by_uuid = {gpu.uuid.removeprefix("GPU-"): gpu for gpu in report.gpus if gpu.uuid}
    gpus = []
    for index, properties in enumerate(all_properties):
        uuid = str(getattr(properties, "uuid", "")).removeprefix("GPU-")
        known = by_uuid.get(uuid, Gpu(index, properties.name))
        sm = f"sm_{properties.major}{properties.minor}"
        gpus.append(replace(known, index=index, sm=sm, memory_bytes=int(properties.total_memory)))
    if gpus:
        return VisibleGpus(tuple(gpus))
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    return VisibleGpus(
        error="CUDA shows no device" if hidden is None else f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU"
    )


def why_unusable(gpu: Gpu, build: TorchBuild) -> str | None:
    """Why torch cannot train on this GPU, in one clause; None if it can."""
    if not build.installed:
        return "torch is not installed"
    if build.error is not None:
        return "torch does not import"
    if build.is_cpu_build:
        return f"torch {build.version} is a CPU build"
    # ROCm calls its archs gfx...; an unknown sm or an empty list is no reason to refuse.
    if build.cuda and gpu.sm and build.archs and arch_support(gpu.sm, build.archs) is Support.MISSING:
        return f"torch {build.version} has no code for {gpu.sm} (it has {' '.join(build.archs)})"
    return None


def usable_devices() -> list[Device]:
    """The devices of a run with 'auto': every usable CUDA device, or one cpu if there is none."""
    build = read_torch()
    visible = read_visible(build, GpuReport())
    cuda = [Device("cuda", gpu.index) for gpu in visible.gpus if why_unusable(gpu, build) is None]
    return cuda or [Device("cpu")]
