"""A small model with its inputs and steps, for tests of optimizers without a sum of gradients."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def tower() -> nn.Sequential:
    own = torch.Generator().manual_seed(4)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)).double()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=own, dtype=torch.float64) * 0.4)
    return model


def inputs(number: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def run(model: nn.Module, optimizer: Optimizer, steps: int = 3) -> dict[str, Tensor]:
    """The same samples on every rank, so that gradients need no sum."""
    for number in range(steps):
        optimizer.zero_grad()
        model(inputs(number)).square().sum().backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_equal(mine: Any, theirs: Any) -> None:
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
