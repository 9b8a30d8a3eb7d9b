"""A recipe: everything that makes one benchmark model a fixed, comparable task."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from uneven.config import EvalStep, TrainStep


@dataclass(frozen=True)
class Published:
    """A figure from outside this project, to hold ours against."""

    value: float
    source: str


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
    metric: str  # of eval_step's sums, the one that stands for quality
    higher_is_better: bool
    published: Published | None = None
    variants: Mapping[str, Callable[[], nn.Module]] | None = None  # other models under the same recipe
