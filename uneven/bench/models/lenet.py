"""LeNet-5 with BatchNorm on MNIST: convolution, pooling, and BatchNorm buffers that averaging must treat correctly."""

from torch import nn

from uneven.bench.models.recipe import Published, Recipe


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


RECIPE = Recipe(
    name="lenet",
    title="LeNet-5 with BatchNorm",
    num_params=44_470,
    make_model=make_model,
    published=Published(0.99, "LeCun et al. 1998, LeNet-5, 0.990 to 0.992", worst=0.985),
)
