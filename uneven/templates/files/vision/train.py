"""A small convolutional network that reads handwritten digits. Start it by: uneven run train.py"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from uneven import Ddp, TrainedState, fit
from uneven.data import datasets

Batch = tuple[Tensor, Tensor]


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """The training and the test set: 10,000 and 2,000 digits that come with uneven.

    In their place return any data sets of yours, such as torchvision.datasets.ImageFolder("photos/train", transform).
    What is read file by file is read faster with num_workers = 4 in run.toml.
    """
    digits = datasets.load("mnist-mini")
    return (
        TensorDataset(torch.from_numpy(digits.train_images).float() / 255, torch.from_numpy(digits.train_labels)),
        TensorDataset(torch.from_numpy(digits.test_images).float() / 255, torch.from_numpy(digits.test_labels)),
    )


class LeNet(nn.Module):
    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, kernel_size=5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, kernel_size=5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        scores: Tensor = self.fc3(F.relu(self.fc2(x)))
        return scores


def train_step(model: nn.Module, batch: Batch) -> Tensor:
    """The mean loss of a batch; uneven calls backward and steps the optimizer."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def eval_step(model: nn.Module, batch: Batch) -> tuple[dict[str, Tensor], int]:
    """Sums over a batch of the test set, and the number of its samples."""
    images, labels = batch
    output = model(images)
    loss = F.cross_entropy(output, labels, reduction="sum")
    return {"loss": loss, "accuracy": (output.argmax(1) == labels).sum()}, len(labels)


def train(**settings: Any) -> TrainedState:
    """Train on the devices of run.toml; more settings may be given here, as in train(max_steps=10)."""
    train_set, test_set = load_data()
    return fit(
        model=LeNet,
        optimizer=lambda params: torch.optim.Adam(params, lr=2e-3),
        step=train_step,
        dataset=train_set,
        evaluate=(test_set, eval_step),
        batch_size=64,  # per device
        epochs=3,
        **settings,
    )


if __name__ == "__main__":
    state = train()
    if Ddp.rank() == 0:
        print(f"accuracy on the test set: {state.history[-1]['accuracy']:.1%}")
