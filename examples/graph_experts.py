"""A mixture of experts: a gate weights four small nets, and a side branch shows which of them it trusts."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from uneven import Ddp, FlowBuilder
from uneven.data import datasets

digits = datasets.load("mnist-mini")
images = torch.from_numpy(digits.train_images).float().flatten(1) / 255
train_set = TensorDataset(images, torch.from_numpy(digits.train_labels))

router = nn.Linear(784, 4)
experts = [FlowBuilder.from_(nn.Linear(784, 32)).through(nn.ReLU()).through(nn.Linear(32, 10)) for _ in range(4)]
graph = (
    FlowBuilder("experts")
    .fork(router).tag("trust")
    .gate(router, experts)
    .build(images[:2], outputs=["trust"])
)  # fmt: skip

ddp = Ddp.setup(graph, lambda params: torch.optim.Adam(params, lr=3e-3), dataset=train_set, batch_size=32, epochs=3)
for epoch in range(3):
    for x, y in ddp.batches(epoch):
        scores, trust = ddp(x)
        # Experts share the work only if no one is trusted with all of it.
        use = trust.softmax(1).mean(0)
        ddp.step(F.cross_entropy(scores, y) + 0.1 * (use * use.log()).sum())
state = ddp.finish()

if ddp.rank == 0:
    test = torch.from_numpy(digits.test_images).float().flatten(1) / 255
    scores, trust = graph.cpu()(test)
    print("trust", [round(one, 2) for one in trust.softmax(1).mean(0).tolist()])
    right = (scores.argmax(1) == torch.from_numpy(digits.test_labels)).float().mean()
    print(f"accuracy {right:.3f}")
