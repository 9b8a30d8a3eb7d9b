"""A residual net as a flow, trained by a loop of one's own; on several devices: uneven run --devices cpu,cpu@0.4 ..."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from uneven import Ddp, FlowBuilder
from uneven.data import datasets

digits = datasets.load("mnist-mini")
images = torch.from_numpy(digits.train_images).float() / 255
train_set = TensorDataset(images, torch.from_numpy(digits.train_labels))


def block(channels_in, channels, name):
    body = (
        FlowBuilder.from_(nn.Conv2d(channels_in, channels, 3, stride=2, padding=1))
        .through(nn.ReLU())
        .through(nn.Conv2d(channels, channels, 3, padding=1))
    )
    skip = nn.Conv2d(channels_in, channels, 1, stride=2)
    return FlowBuilder(name).also_with(skip, body).through(nn.ReLU())


graph = (
    FlowBuilder("residual")
    .through(block(1, 8, "first"))
    .through(block(8, 16, "second"))
    .through(nn.Flatten())
    .through(nn.Linear(16 * 7 * 7, 10)).tag("scores")
    .build(images[:2])
)  # fmt: skip

ddp = Ddp.setup(graph, torch.optim.Adam, dataset=train_set, batch_size=32, epochs=2)
for epoch in range(2):
    for x, y in ddp.batches(epoch):
        ddp.step(F.cross_entropy(ddp(x), y))
state = ddp.finish()

if ddp.rank == 0:
    test = torch.from_numpy(digits.test_images).float() / 255
    right = (graph.cpu()(test).argmax(1) == torch.from_numpy(digits.test_labels)).float().mean()
    print(f"accuracy {right:.3f}")
