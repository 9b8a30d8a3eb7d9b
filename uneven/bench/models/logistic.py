"""Logistic regression on MNIST: the linear baseline, one matrix."""

from torch import nn

from uneven.bench.models.recipe import Published, Recipe


def make_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


RECIPE = Recipe(
    name="logistic",
    title="logistic regression",
    num_params=7_850,
    make_model=make_model,
    published=Published(0.92, "LeCun et al. 1998, linear classifier, about 0.92", worst=0.915),
)
