"""A recipe makes a benchmark model a fixed, comparable task; with the train and eval steps that recipes share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn import functional as F
from torch.optim import Adam, Optimizer

from uneven.config import EvalStep, TrainStep


@dataclass(frozen=True)
class Published:
    """A published quality, to compare ours with."""

    value: float
    source: str
    worst: float  # the worst quality that still agrees with it
    is_best: bool = False  # of the best evaluation, not the last one: the recipe trains past it


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


def adam(params: Any) -> Optimizer:
    return Adam(params, lr=1e-3)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Model, data, optimizer, schedule and evaluation of one benchmark; factories as `fit` takes them.

    What is left out is that of a classifier of MNIST.
    """

    name: str
    title: str
    num_params: int
    make_model: Callable[..., nn.Module]  # language models take the size of the vocabulary
    published: Published | None = None
    data: str = "mnist"  # the data set's name
    batch_size: int = 64  # per device
    epochs: int = 5
    make_optimizer: Callable[[Any], Optimizer] = adam
    make_scheduler: Callable[[Optimizer, int], Any] | None = None
    train_step: TrainStep = classify
    eval_step: EvalStep = evaluate_classifier
    metric: str = "accuracy"  # the entry of eval_step's sums that measures quality
    higher_is_better: bool = True
