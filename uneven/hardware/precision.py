"""Which number format a rank trains in by default.

Decided from the device the rank was given, never from "CUDA is present": a CPU rank beside a GPU is still
a CPU rank. Every answer comes with its reason, which is printed.
"""

from uneven.config import Precision
from uneven.hardware.device import Device
from uneven.hardware.gpus import Gpu
from uneven.hardware.system import System
from uneven.hardware.torchbuild import parse_sm


def choose_precision(device: Device, system: System, gpu: Gpu | None) -> tuple[Precision, str]:
    """('bf16' | 'fp16' | 'fp32', why) for one device; `gpu` is the one a CUDA device names."""
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
