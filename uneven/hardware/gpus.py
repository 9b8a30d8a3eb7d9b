"""The NVIDIA GPUs as the driver lists them, from NVML, or an empty report with the reason.

Never initialises CUDA. The order is the driver's (PCI bus); CUDA may number the GPUs differently, see inventory.py.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uneven.hardware.optional import or_none, read_text


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
