"""Modules that the tests of graphs use as parts."""

import torch
from torch import Tensor, nn


class TwoInputs(nn.Module):
    """x and one more."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return torch.tanh(self.linear(torch.cat([x, other], -1)))
