"""The train and evaluation step that the language models share: cross-entropy per character."""

from typing import Any

from torch import nn
from torch.nn import functional as F


def train_step(model: nn.Module, batch: Any) -> Any:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def eval_step(model: nn.Module, batch: Any) -> tuple[dict[str, Any], int]:
    inputs, targets = batch
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
    return {"loss": loss}, targets.numel()
