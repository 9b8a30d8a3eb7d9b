"""Checks before any process is started: is this machine supported, and does this device exist.

Called by launch/ and the command line. Every error is one line with what was found, what is required and the command to
run next.
"""

import os
import platform
from collections.abc import Mapping

from uneven.errors import InputError, MachineError, TorchMissingError
from uneven.hardware.device import Device
from uneven.hardware.gpus import Gpu, read_gpus, read_visible, why_unusable
from uneven.hardware.mps import require_mps
from uneven.hardware.torchbuild import installed_version, parse_sm, read_torch, release

OLDEST_TORCH = (2, 8)
TESTED = "Linux; torch 2.8, 2.11 and 2.13"
INSTALL = "uneven setup"
OLDEST_SLICED = (7, 0)  # before Volta, MPS ignores the percentage and a slice would be the whole GPU


def why_untested(system: str, is_rocm: bool) -> str | None:
    """Why nobody knows whether uneven trains right on this operating system and build of torch; None where it does."""
    if system != "Linux":
        return f"this is {system or 'unknown'}, but only {TESTED} are tested"
    return f"this torch is a build for ROCm, but only {TESTED} for CUDA or the CPU are tested" if is_rocm else None


def refuse_unsupported(environ: Mapping[str, str] = os.environ) -> None:
    """MachineError unless this is Linux with a torch for CUDA or the CPU (or UNEVEN_UNTESTED=1), and torch is not too
    old. Does not import torch.
    """
    version = installed_version()
    why = why_untested(platform.system(), "rocm" in (version or ""))
    if why is not None and environ.get("UNEVEN_UNTESTED") != "1":
        raise MachineError(f"{why}; set UNEVEN_UNTESTED=1 to try anyway, or run 'uneven diagnose' for a full report")
    if version is None:
        raise TorchMissingError
    major_minor = release(version)
    if major_minor is not None and major_minor < OLDEST_TORCH:
        raise MachineError(f"torch {version} is too old (tested: {TESTED}); run: {INSTALL}")


def check_device(device: Device) -> None:
    """InputError if this device does not exist, MachineError if torch cannot train on it."""
    if device.kind == "cpu":
        return
    build, report = read_torch(), read_gpus()
    visible = read_visible(build, report)
    available = ", ".join(["cpu", *(f"cuda:{gpu.index}" for gpu in visible.gpus)])
    gpu = next((gpu for gpu in visible.gpus if gpu.index == device.index), None)
    if gpu is not None:
        why = why_unusable(gpu, build)
        if why is not None:
            raise MachineError(f"device {str(device)!r} ({gpu.name}): {why}; run 'uneven diagnose' for what to install")
        if device.percent is not None:
            _check_slice(device, gpu)
        return
    if report.gpus and not visible.gpus:
        # The GPU exists, so the input is right: torch cannot use it.
        names = ", ".join(gpu.name for gpu in report.gpus)
        raise MachineError(
            f"device {str(device)!r}: this machine has {names}, but {visible.error}; "
            "run 'uneven diagnose' for what to install"
        )
    cause = f" ({visible.error}: run 'uneven diagnose')" if visible.error else ""
    raise InputError(f"device {str(device)!r}: this machine has {available}{cause}; run 'uneven devices' for the list")


def _check_slice(device: Device, gpu: Gpu) -> None:
    capability = parse_sm(gpu.sm) if gpu.sm is not None else None
    if capability is not None and capability < OLDEST_SLICED:
        raise MachineError(
            f"device {str(device)!r} ({gpu.name}): slices need sm_70 or newer, this is {gpu.sm}; "
            f"'{device.torch_name}@0.4' simulates a slower device without them"
        )
    require_mps(device)
