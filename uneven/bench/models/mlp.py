"""A two-layer perceptron on MNIST: so small that dispatch overhead dominates."""

from torch import nn

from uneven.bench.models.recipe import Published, Recipe


def make_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))


RECIPE = Recipe(
    name="mlp",
    title="two-layer perceptron",
    num_params=203_530,
    make_model=make_model,
    published=Published(0.975, "LeCun et al. 1998, two-layer networks, 0.953 to 0.975", worst=0.97),
)
