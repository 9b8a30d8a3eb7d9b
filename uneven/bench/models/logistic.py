"""Logistic regression on MNIST: the linear baseline, one matrix."""

import torch
from torch import nn

from uneven.bench.models.recipe import Published, Recipe, classify, evaluate_classifier


def make_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


RECIPE = Recipe(
    name="logistic",
    title="logistic regression",
    data="mnist",
    batch_size=64,
    epochs=5,
    num_params=7_850,
    make_model=make_model,
    make_optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
    train_step=classify,
    eval_step=evaluate_classifier,
    metric="accuracy",
    higher_is_better=True,
    published=Published(0.92, "LeCun et al. 1998, linear classifier, about 0.92", worst=0.915),
)
