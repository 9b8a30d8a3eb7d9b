"""A convolutional autoencoder on MNIST: reconstruction, judged by its mean squared error."""

from typing import Any

from torch import nn
from torch.nn import functional as F

from uneven.bench.models.recipe import Published, Recipe


def make_model() -> nn.Module:
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


def train_step(model: nn.Module, batch: Any) -> Any:
    images, _ = batch
    return F.mse_loss(model(images), images)


def eval_step(model: nn.Module, batch: Any) -> tuple[dict[str, Any], int]:
    images, _ = batch
    return {"mse": F.mse_loss(model(images), images, reduction="sum")}, images.numel()


RECIPE = Recipe(
    name="conv-ae",
    title="convolutional autoencoder",
    num_params=9_569,
    make_model=make_model,
    train_step=train_step,
    eval_step=eval_step,
    metric="mse",
    higher_is_better=False,
    published=Published(0.0005, "own: one CPU device, 0.00046", worst=0.001),
)
