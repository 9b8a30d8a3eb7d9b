"""Precision of a step: fp32, bf16 by autocast, fp16 by autocast with a loss scaler.

Params and optimizer state stay fp32 in each, so averages and checkpoints are never in half precision.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.optim import Optimizer

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """The autocast region of one device and, for fp16, its scaler."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.device = device
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")
        self.is_stepping = False  # an optimizer: whoever else steps it is the user's script (api/script_steps.py)
        # Makes its tensors: a rank without samples steps, too, and has scaled no loss before.
        self.scaler.scale(torch.ones((), device=device))

    def step(self, optimizer: Optimizer) -> None:
        """Every update of a run goes through here."""
        self.is_stepping = True
        try:
            self.scaler.step(optimizer)
            self.scaler.update()
        finally:
            self.is_stepping = False

    def region(self) -> AbstractContextManager[object]:
        if self.name == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=_TYPES[self.name])


@contextmanager
def device_flags(device: torch.device) -> Iterator[None]:
    """CUDA flags of a run, restored afterwards: TF32, and cuDNN kernels chosen by measuring."""
    if device.type != "cuda":
        yield
        return
    saved = torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    try:
        with torch.cuda.device(device):
            yield
    finally:
        torch.backends.cudnn.benchmark = saved[0]
        torch.set_float32_matmul_precision(saved[1])
