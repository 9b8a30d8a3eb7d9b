"""A loop that thinks as long as it needs: each digit is refined until the net is sure of it, five passes at most."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from uneven import Ddp, FlowBuilder
from uneven.data import datasets

digits = datasets.load("mnist-mini")
images = torch.from_numpy(digits.train_images).float().flatten(1) / 255
train_set = TensorDataset(images, torch.from_numpy(digits.train_labels))

scores = nn.Linear(64, 10)


def sure(found):
    """One truth per sample; a sample that is done keeps its value while others go on."""
    return found.softmax(1).amax(1) > 0.9


body = FlowBuilder().also(FlowBuilder.from_(nn.Linear(64, 64)).through(nn.Tanh()))
graph = (
    FlowBuilder("halt")
    .through(nn.Linear(784, 64)).through(nn.Tanh())
    .loop(body).until(FlowBuilder.from_(scores).through(sure), most=5)
    .through(scores).tag("scores")
    .build(images[:2])
)  # fmt: skip

ddp = Ddp.setup(graph, lambda params: torch.optim.Adam(params, lr=3e-3), dataset=train_set, batch_size=32, epochs=3)
for epoch in range(3):
    for x, y in ddp.batches(epoch):
        ddp.step(F.cross_entropy(ddp(x), y))
state = ddp.finish()

if ddp.rank == 0:
    test = torch.from_numpy(digits.test_images).float().flatten(1) / 255
    right = (graph.cpu()(test).argmax(1) == torch.from_numpy(digits.test_labels)).float().mean()
    print(f"accuracy {right:.3f}")
