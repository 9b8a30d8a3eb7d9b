"""The CUDA devices with torch's indices, and the devices of a run with `devices="auto"`.

The driver lists GPUs by PCI bus. CUDA numbers the fastest first and hides GPUs that are not in CUDA_VISIBLE_DEVICES.
`cuda:1` uses CUDA's index, so torch is queried where possible, and both lists are joined by UUID.
"""

import os
import warnings
from dataclasses import dataclass, replace

from uneven.hardware.device import Device
from uneven.hardware.gpus import Gpu, GpuReport
from uneven.hardware.torchbuild import Support, TorchBuild, arch_support, read_torch


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
