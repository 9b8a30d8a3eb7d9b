"""The number format that precision='auto' means on a device. Called by launch/preflight.py and `uneven diagnose`.

Decided from the device itself, never from "CUDA is present": a CPU rank beside a GPU is still a CPU rank. The reason
is returned with the choice, and both are printed.
"""

from uneven.config import Precision
from uneven.hardware.device import Device
from uneven.hardware.gpus import Gpu
from uneven.hardware.system import System
from uneven.hardware.torchbuild import parse_sm


def choose_precision(device: Device, system: System, gpu: Gpu | None) -> tuple[Precision, str]:
    """The format a device computes natively, and the reason; `gpu` is the GPU that a CUDA device names."""
    if device.kind == "cpu":
        if system.cpu.flags:
            return "bf16", f"the cpu has native bf16 ({', '.join(system.cpu.flags)})"
        return "fp32", "the cpu has no native bf16"
    capability = parse_sm(gpu.sm) if gpu is not None and gpu.sm is not None else None
    if gpu is None or capability is None:
        return "fp32", "the GPU's architecture is unknown"
    if capability >= (8, 0):
        return "bf16", f"{gpu.sm} has native bf16"
    if capability >= (7, 0):
        return "fp16", f"{gpu.sm} has fp16 tensor cores but no native bf16"
    return "fp32", f"{gpu.sm} has no tensor cores"
