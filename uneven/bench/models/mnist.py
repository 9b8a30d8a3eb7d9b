"""Four small models on MNIST: a matrix, a perceptron, LeNet-5 with BatchNorm, and a convolutional autoencoder."""

from typing import Any

from torch import nn
from torch.nn import functional as F

from uneven.bench.models.recipe import Published, Recipe


def make_logistic() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def make_mlp() -> nn.Module:
    """So small that dispatch overhead dominates."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))


def make_lenet() -> nn.Module:
    """Its BatchNorm buffers are what averaging must treat correctly."""
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


def make_autoencoder() -> nn.Module:
    """Judged by the mean squared error of what it reconstructs."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 3, stride=2, padding=1, output_padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 3, stride=2, padding=1, output_padding=1),
        nn.Sigmoid(),
    )


def reconstruct(model: nn.Module, batch: Any) -> Any:
    images, _ = batch
    return F.mse_loss(model(images), images)


def evaluate_reconstruction(model: nn.Module, batch: Any) -> tuple[dict[str, Any], int]:
    images, _ = batch
    return {"mse": F.mse_loss(model(images), images, reduction="sum")}, images.numel()


LOGISTIC = Recipe(
    name="logistic",
    title="logistic regression",
    num_params=7_850,
    make_model=make_logistic,
    published=Published(0.92, "LeCun et al. 1998, linear classifier, about 0.92", worst=0.915),
)
MLP = Recipe(
    name="mlp",
    title="two-layer perceptron",
    num_params=203_530,
    make_model=make_mlp,
    published=Published(0.975, "LeCun et al. 1998, two-layer networks, 0.953 to 0.975", worst=0.97),
)
LENET = Recipe(
    name="lenet",
    title="LeNet-5 with BatchNorm",
    num_params=44_470,
    make_model=make_lenet,
    published=Published(0.99, "LeCun et al. 1998, LeNet-5, 0.990 to 0.992", worst=0.985),
)
AUTOENCODER = Recipe(
    name="conv-ae",
    title="convolutional autoencoder",
    num_params=9_569,
    make_model=make_autoencoder,
    train_step=reconstruct,
    eval_step=evaluate_reconstruction,
    metric="mse",
    higher_is_better=False,
    published=Published(0.0005, "own: one CPU device, 0.00046", worst=0.001),
)
