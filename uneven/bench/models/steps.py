"""Training and evaluation steps that benchmark models share: classifiers, and language models over characters."""

from typing import Any

from torch import nn
from torch.nn import functional as F


def classify(model: nn.Module, batch: Any) -> Any:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def evaluate_classifier(model: nn.Module, batch: Any) -> tuple[dict[str, Any], int]:
    images, labels = batch
    scores = model(images)
    right = (scores.argmax(1) == labels).sum()
    return {"accuracy": right, "loss": F.cross_entropy(scores, labels, reduction="sum")}, len(labels)


def predict_next(model: nn.Module, batch: Any) -> Any:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def evaluate_next(model: nn.Module, batch: Any) -> tuple[dict[str, Any], int]:
    inputs, targets = batch
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
    return {"loss": loss}, targets.numel()
