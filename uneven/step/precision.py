"""Arithmetic of a step: fp32, bf16 by autocast, fp16 by autocast with a loss scaler.

Params and optimizer state stay fp32 whatever the precision, so averages and checkpoints never see halves.
"""

from contextlib import AbstractContextManager, nullcontext

import torch

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """The autocast region of one device and, for fp16, its scaler."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.device = device
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")

    def region(self) -> AbstractContextManager[object]:
        if self.name == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=_TYPES[self.name])
