"""A loop of your own: `Ddp.setup` hands out the batches and takes the loss; also under `uneven run` and torchrun."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from uneven import Ddp
from uneven.data import datasets

digits = datasets.load("mnist-mini")
images = torch.from_numpy(digits.train_images).float() / 255
train_set = TensorDataset(images, torch.from_numpy(digits.train_labels))
model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))

ddp = Ddp.setup(model, torch.optim.Adam, dataset=train_set, batch_size=32, epochs=3)
for epoch in range(3):
    for x, y in ddp.batches(epoch):
        ddp.step(F.cross_entropy(ddp(x), y))
state = ddp.finish()

if ddp.rank == 0:
    test = torch.from_numpy(digits.test_images).float() / 255
    right = (model.cpu()(test).argmax(1) == torch.from_numpy(digits.test_labels)).float().mean()
    print(f"accuracy {right:.3f}")
