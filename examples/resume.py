"""A loop that goes on where it was stopped: press Ctrl-C, or send SIGTERM, and start it again."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from uneven import Ddp
from uneven.data import datasets

digits = datasets.load("mnist-mini")
images = torch.from_numpy(digits.train_images).float() / 255
test = torch.from_numpy(digits.test_images).float() / 255, torch.from_numpy(digits.test_labels)
train_set = TensorDataset(images, torch.from_numpy(digits.train_labels))
model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))

ddp = Ddp.setup(
    model,
    torch.optim.Adam,
    dataset=train_set,
    batch_size=32,
    epochs=3,
    out="runs/resume",
    save_every="1 epoch",
    resume="auto",
)
best = ddp.register("best", {"accuracy": 0.0})  # kept in every checkpoint
for epoch in range(ddp.epochs):
    for x, y in ddp.batches(epoch):  # none of an epoch that is done
        ddp.step(F.cross_entropy(ddp(x), y))
    with torch.no_grad():
        right = (ddp(test[0].to(ddp.device)).argmax(1).cpu() == test[1]).float().mean().item()
    best["accuracy"] = max(best["accuracy"], right)
    ddp.log(accuracy=right)
ddp.finish()

if ddp.rank == 0:
    print(f"best accuracy {best['accuracy']:.3f}")
