"""Nets that FSDP cuts, and training them by FSDP and densely."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from uneven.comm.group import Group
from uneven.parallel.strategy import Strategy

WIDTH, ROWS, STEPS = 6, 8, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return hidden


class ExpLog(nn.Module):
    """Changes nothing. Behind a block it makes backward compute that again before its output has a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp().log()


class Tower(nn.Module):
    """Blocks in a list, called in `order`; a first and a last layer make the root. `saves`: a checkpoint for each
    block, with something "behind" it, or one for "all" of them.
    """

    def __init__(
        self, order: Sequence[int] = (0, 1, 2), saves: bool | str = False, dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.order, self.saves = order, saves
        own = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=own) * 0.3)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.saves == "all":
            x = checkpoint(self._through, x, use_reentrant=False)
        else:
            for place in self.order:
                block = self.blocks[place]
                if self.saves == "behind":
                    block = nn.Sequential(block, ExpLog())
                x = checkpoint(block, x, use_reentrant=False) if self.saves else block(x)
        scores: Tensor = self.last(x)
        return scores

    def _through(self, x: Tensor) -> Tensor:
        for place in self.order:
            x = self.blocks[place](x)
        return ExpLog()(x)


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank update beside it, which is trained."""

    def __init__(self, base: nn.Linear, rank: int, own: torch.Generator) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=base.weight.dtype)
        with torch.no_grad():
            for layer in (self.down, self.up):
                layer.weight.copy_(torch.randn(layer.weight.shape, generator=own) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + self.up(self.down(x))
        return found


def adapted(model: nn.Module, first: int = 0, rank: int = 2) -> nn.Module:
    """The model frozen, with updates to all linear layers of its blocks from this one on."""
    own = torch.Generator().manual_seed(3)  # threads share the default one
    model.requires_grad_(False)
    for block in list(model.blocks)[first:]:  # type: ignore[call-overload]
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(block, name, Adapted(layer, rank, own))
    return model


def make_adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def batch(step: int) -> Tensor:
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def train(strategy: Strategy, group: Group) -> dict[str, Tensor]:
    for step in range(STEPS):
        rows = batch(step).chunk(group.world_size)[group.rank]
        (strategy.module(rows).square().sum() / ROWS).backward()
        strategy.optimizer.step()
        strategy.optimizer.zero_grad()
    return strategy.full_state().model


def dense() -> dict[str, Tensor]:
    model = Tower()
    optimizer = make_adamw(model.parameters())
    for step in range(STEPS):
        (model(batch(step)).square().sum() / ROWS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())
