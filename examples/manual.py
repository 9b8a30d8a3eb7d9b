"""The gradient sum alone: `Ddp.wrap` leaves the model, the optimizer and the data to you."""

import torch
from torch import nn
from torch.nn import functional as F

from uneven import Ddp
from uneven.data import datasets

digits = datasets.load("mnist-mini")
images = torch.from_numpy(digits.train_images).float() / 255
labels = torch.from_numpy(digits.train_labels)
model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.Adam(model.parameters())

ddp = Ddp.wrap(model)  # rank 0's params on every rank, as in DDP
torch.manual_seed(0)  # the same order on every rank
for _ in range(3):
    for batch in torch.randperm(len(images)).split(64):
        mine = batch[ddp.rank :: ddp.world_size]  # any split will do
        optimizer.zero_grad()
        F.cross_entropy(ddp(images[mine]), labels[mine]).backward()
        ddp.weighted_all_reduce_gradients(len(mine))
        optimizer.step()
ddp.close()

if ddp.rank == 0:
    test = torch.from_numpy(digits.test_images).float() / 255
    right = (model(test).argmax(1) == torch.from_numpy(digits.test_labels)).float().mean()
    print(f"accuracy {right:.3f}")
