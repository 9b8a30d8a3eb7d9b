"""Lightning's image classifier with a DataModule; the lines that uneven adds are marked.

uneven run examples/lightning_classifier.py --devices cpu,cpu@0.4
torchrun --nproc-per-node 2 examples/lightning_classifier.py
python examples/lightning_classifier.py                            # Lightning starts a process for each device
"""

import argparse
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from uneven.data import datasets
from uneven.integrations.lightning import UnevenStrategy  # uneven


class Digits(L.LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        del stage  # the same data for all of them
        digits = datasets.load("mnist-mini")
        self.train_set, self.test_set = (
            TensorDataset(torch.from_numpy(images).float() / 255, torch.from_numpy(labels))
            for images, labels in (
                (digits.train_images, digits.train_labels),
                (digits.test_images, digits.test_labels),
            )
        )

    def train_dataloader(self) -> "DataLoader[Any]":
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> "DataLoader[Any]":
        return DataLoader(self.test_set, batch_size=self.batch_size)


class ImageClassifier(L.LightningModule):
    def __init__(self, lr: float = 0.003) -> None:
        super().__init__()
        self.lr = lr
        self.model = nn.Sequential(
            *(nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 5, stride=2), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(512, 10)),
        )

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def validation_step(self, batch: Any) -> None:
        x, y = batch
        self.log("accuracy", (self.model(x).argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Shares(L.Callback):
    """Says how the steps are divided."""

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        shares = trainer.strategy.shares
        if trainer.is_global_zero:
            print(f"epoch {trainer.current_epoch + 1}: shares {shares.of(shares.step)}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="samples of a step, of each device")
    args = parser.parse_args()
    L.seed_everything(0)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=UnevenStrategy(),  # uneven: in place of "ddp"
        max_epochs=args.epochs,
        callbacks=[Shares()],
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(ImageClassifier(), Digits(args.batch_size))
    if trainer.is_global_zero:
        print(f"accuracy {trainer.callback_metrics['accuracy']:.3f}")
