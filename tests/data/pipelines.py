"""A small set of samples of different lengths with its collate, model and step, and the plain loop to compare with."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

QUIET: dict[str, Any] = {"devices": "cpu", "progress": "off"}
_generator = torch.Generator().manual_seed(0)
LENGTHS = torch.randint(3, 9, (53,), generator=_generator).tolist()
SAMPLES = [(torch.randn(length, generator=_generator).double(), length % 2) for length in LENGTHS]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def pad(samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    rows, labels = zip(*samples, strict=True)
    lengths = torch.tensor([len(row) for row in rows])
    return {"x": pad_sequence(list(rows), batch_first=True), "lengths": lengths, "y": torch.tensor(labels)}


class Net(nn.Module):
    """Filled from a generator of its own: threads share torch's global one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 5), nn.Linear(5, 2)
        own = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=own) * 0.3)
        self.double()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        lengths = batch["lengths"][:, None]
        mask = torch.arange(batch["x"].shape[1])[None] < lengths
        hidden = torch.tanh(self.first(batch["x"][..., None])) * mask[..., None]
        return self.second(hidden.sum(1) / lengths)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch), batch["y"])


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def plain_loop(epochs: Iterable[Iterable[Any]]) -> dict[str, Tensor]:
    """Params after training on these batches, epoch by epoch."""
    model = Net()
    optimizer = sgd(model.parameters())
    for batches in epochs:
        for batch in batches:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def assert_same_params(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert ours.keys() == expected.keys()
    start = dict(Net().named_parameters())
    for name, value in ours.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12)
        assert (value - start[name]).abs().max() > 1e-6, "nothing was trained"
