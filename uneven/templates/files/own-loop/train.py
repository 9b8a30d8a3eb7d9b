"""A training loop of your own, on one device or on many. Start it by: uneven run train.py"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from uneven import Ddp, TrainedState
from uneven.data import datasets


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """The training and the test set: handwritten digits that come with uneven. Any data set of yours will do."""
    digits = datasets.load("mnist-mini")
    return (
        TensorDataset(torch.from_numpy(digits.train_images).float() / 255, torch.from_numpy(digits.train_labels)),
        TensorDataset(torch.from_numpy(digits.test_images).float() / 255, torch.from_numpy(digits.test_labels)),
    )


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=5, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=5, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


@torch.no_grad()
def accuracy(model: nn.Module, test_set: TensorDataset, device: torch.device) -> float:
    model.eval()
    images, labels = (tensor.to(device) for tensor in test_set.tensors)
    right = model(images).argmax(1) == labels
    model.train()
    return float(right.float().mean())


def train(**settings: Any) -> TrainedState:
    """Train on the devices of run.toml; more settings may be given here, as in train(max_steps=10)."""
    train_set, test_set = load_data()
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    # It moves the model to this process's device and meets the other processes.
    ddp = Ddp.setup(model, optimizer, dataset=train_set, batch_size=64, epochs=3, **settings)
    for epoch in range(ddp.epochs):
        for images, labels in ddp.batches(epoch):  # this device's share, by its speed
            loss = F.cross_entropy(model(images), labels)
            ddp.step(loss)  # zero_grad, backward, the other devices' gradients, optimizer.step
        ddp.log(accuracy=accuracy(model, test_set, ddp.device))  # into the history
    return ddp.finish()


if __name__ == "__main__":
    state = train()
    if Ddp.rank() == 0:
        print(f"accuracy on the test set: {state.history[-1]['accuracy']:.1%}")
