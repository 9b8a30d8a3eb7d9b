"""A recipe makes a benchmark model a fixed, comparable task; below it, the train and eval steps that recipes share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

from uneven.config import EvalStep, TrainStep


@dataclass(frozen=True)
class Published:
    """A published quality, to compare ours with."""

    value: float
    source: str
    worst: float  # the worst quality that still agrees with it
    is_best: bool = False  # of the best evaluation, not the last one: the recipe trains past it


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Model, data, optimizer, schedule and evaluation of one benchmark; factories as `fit` takes them."""

    name: str
    title: str
    data: str  # the data set's name
    batch_size: int  # per device
    epochs: int
    num_params: int
    make_model: Callable[..., nn.Module]  # language models take the size of the vocabulary
    make_optimizer: Callable[[Any], Optimizer]
    make_scheduler: Callable[[Optimizer, int], Any] | None = None
    train_step: TrainStep
    eval_step: EvalStep
    metric: str  # the entry of eval_step's sums that measures quality
    higher_is_better: bool
    published: Published | None = None
    variants: Mapping[str, Callable[[], nn.Module]] | None = None  # other models under the same recipe


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
