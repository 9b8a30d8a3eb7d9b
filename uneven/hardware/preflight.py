"""The verdict before anything starts: is this a machine we support, and is this device there.

Everything is one line with what was found, what would do, and the next command. run.py and the command
line call these before the first process is started.
"""

import os
import platform
from collections.abc import Mapping

from uneven.errors import InputError, MachineError
from uneven.hardware.device import Device
from uneven.hardware.gpus import Gpu, read_gpus
from uneven.hardware.inventory import read_visible, usable_devices, why_unusable
from uneven.hardware.mps import require_mps
from uneven.hardware.torchbuild import installed_version, parse_sm, read_torch, release

__all__ = ["check_device", "refuse_unsupported", "usable_devices"]

OLDEST_TORCH = (2, 8)
TESTED = "Linux; torch 2.8, 2.11 and 2.13"
INSTALL = "pip install 'torch>=2.8'"
OLDEST_SLICED = (7, 0)  # before Volta MPS knows no percentage: a slice would be the whole GPU


def refuse_unsupported(environ: Mapping[str, str] = os.environ) -> None:
    """MachineError when this is not Linux (unless UNEVEN_UNTESTED=1) or torch is missing or too old.

    Does not import torch, so it costs nothing.
    """
    system = platform.system() or "unknown"
    if system != "Linux" and environ.get("UNEVEN_UNTESTED") != "1":
        raise MachineError(
            f"this is {system}, tested is {TESTED}; set UNEVEN_UNTESTED=1 to try anyway, "
            "or run 'uneven diagnose' for the whole report"
        )
    version = installed_version()
    if version is None:
        raise MachineError(f"torch is not installed, tested is {TESTED}; run: {INSTALL}")
    found = release(version)
    if found is not None and found < OLDEST_TORCH:
        raise MachineError(f"this is torch {version}, tested is {TESTED}; run: {INSTALL}")


def check_device(device: Device) -> None:
    """InputError when this device is not there, MachineError when torch cannot train on it."""
    if device.kind == "cpu":
        return
    build, report = read_torch(), read_gpus()
    visible = read_visible(build, report)
    here = ", ".join(["cpu", *(f"cuda:{gpu.index}" for gpu in visible.gpus)])
    gpu = next((gpu for gpu in visible.gpus if gpu.index == device.index), None)
    if gpu is not None:
        why = why_unusable(gpu, build)
        if why is not None:
            raise MachineError(f"device {str(device)!r} ({gpu.name}): {why}; run 'uneven diagnose' for what to install")
        if device.percent is not None:
            _check_slice(device, gpu)
        return
    if report.gpus and not visible.gpus:
        # The GPU is there and the user is right to name it: it is torch that cannot reach it.
        names = ", ".join(gpu.name for gpu in report.gpus)
        raise MachineError(
            f"device {str(device)!r}: this machine has {names}, but {visible.error}; "
            "run 'uneven diagnose' for what to install"
        )
    also = f" ({visible.error}: run 'uneven diagnose')" if visible.error else ""
    raise InputError(f"device {str(device)!r}: this machine has {here}{also}; run 'uneven devices' for the list")


def _check_slice(device: Device, gpu: Gpu) -> None:
    capability = parse_sm(gpu.sm) if gpu.sm is not None else None
    if capability is not None and capability < OLDEST_SLICED:
        raise MachineError(
            f"device {str(device)!r} ({gpu.name}): slices need sm_70 or newer, this is {gpu.sm}; "
            f"'{device.torch_name}@0.4' simulates a slower device without them"
        )
    require_mps(device)
