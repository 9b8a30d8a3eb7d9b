"""The smallest script: a network, two tensors, one call. Start it by: uneven run train.py"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uneven import Ddp, TensorData, TrainedState, fit

Batch = tuple[Tensor, Tensor]


def make_data(samples: int, seed: int) -> TensorData:
    """Points on two spirals, and on which of them each lies. Put tensors of your own in their place."""
    random = torch.Generator().manual_seed(seed)
    radius = torch.rand(samples, generator=random).sqrt()
    labels = torch.randint(2, (samples,), generator=random)
    angle = 7 * radius + torch.pi * labels
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return TensorData(points + 0.02 * torch.randn(samples, 2, generator=random), labels)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


def train_step(model: nn.Module, batch: Batch) -> Tensor:
    """The mean loss of a batch; uneven calls backward and steps the optimizer."""
    points, labels = batch
    return F.cross_entropy(model(points), labels)


def eval_step(model: nn.Module, batch: Batch) -> tuple[dict[str, Tensor], int]:
    """Sums over a batch of the test set, and the number of its samples."""
    points, labels = batch
    return {"accuracy": (model(points).argmax(1) == labels).sum()}, len(labels)


def train(**settings: Any) -> TrainedState:
    """Train on the devices of run.toml; more settings may be given here, as in train(max_steps=10)."""
    return fit(
        model=make_model,
        optimizer=lambda params: torch.optim.Adam(params, lr=0.01),
        step=train_step,
        dataset=make_data(4096, seed=0),
        evaluate=(make_data(1024, seed=1), eval_step),
        batch_size=64,  # per device
        epochs=10,
        **settings,
    )


if __name__ == "__main__":
    state = train()
    if Ddp.rank() == 0:
        print(f"accuracy on the test set: {state.history[-1]['accuracy']:.1%}")
