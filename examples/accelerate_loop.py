"""A loop of accelerate, with samples by speed: the two lines that uneven adds are marked.

uneven run examples/accelerate_loop.py --devices cpu,cpu@0.4
torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from uneven.data import datasets
from uneven.integrations.accelerate import attach  # uneven

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--samples", type=int, default=10000)
args = parser.parse_args()

accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
set_seed(0)
digits = datasets.load("mnist-mini")
images, labels = torch.from_numpy(digits.train_images).float() / 255, torch.from_numpy(digits.train_labels)
test_images, test_labels = torch.from_numpy(digits.test_images).float() / 255, torch.from_numpy(digits.test_labels)
train_set = TensorDataset(images[: args.samples], labels[: args.samples])
loader = DataLoader(train_set, batch_size=64, shuffle=True)
test_loader = DataLoader(TensorDataset(test_images, test_labels), batch_size=256)
convolutions = nn.Conv2d(1, 32, 5, stride=2), nn.ReLU(), nn.Conv2d(32, 64, 5, stride=2), nn.ReLU()
model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(1024, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)
loader = attach(accelerator, model, loader)  # uneven

for epoch in range(args.epochs):
    model.train()
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    right = 0
    for x, y in test_loader:
        with torch.no_grad():
            guesses, expected = accelerator.gather_for_metrics((model(x).argmax(-1), y))
        right += int((guesses == expected).sum())
    shares = loader.batch_sampler.shares
    accelerator.print(f"epoch {epoch}: shares {shares.of(shares.step)}, accuracy {right / len(test_labels):.3f}")
accelerator.end_training()
