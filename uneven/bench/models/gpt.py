"""A transformer for the benchmark of strategies: all kinds of layers that a strategy shards, in four sizes.

q, k and v are separate layers, because PyTorch's tensor parallelism gives each rank one range of a layer. There is no
dropout, so that all strategies compute the same.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uneven.errors import InputError
from uneven.parallel.tensor_parallel import Columns, Places, Plan, Rows, Words


@dataclass(frozen=True)
class Size:
    width: int
    blocks: int
    heads: int
    vocabulary: int
    window: int

    @property
    def head(self) -> int:
        return self.width // self.heads


SIZES = {
    "gpt": Size(width=512, blocks=8, heads=8, vocabulary=256, window=64),
    "gpt-medium": Size(width=256, blocks=6, heads=8, vocabulary=256, window=64),
    "gpt-small": Size(width=128, blocks=5, heads=8, vocabulary=64, window=32),
    "gpt-tiny": Size(width=32, blocks=2, heads=4, vocabulary=16, window=8),
}


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head = size.head
        self.norm_attention = nn.LayerNorm(size.width)
        self.q = nn.Linear(size.width, size.width)
        # Keys have no bias: softmax cancels it, so its gradient is rounding noise, which Adam scales up to full steps.
        self.k = nn.Linear(size.width, size.width, bias=False)
        self.v = nn.Linear(size.width, size.width)
        self.project = nn.Linear(size.width, size.width)
        self.norm_feed = nn.LayerNorm(size.width)
        self.expand = nn.Linear(size.width, 4 * size.width)
        self.contract = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.project(self._attend(self.norm_attention(x)))
        added: Tensor = self.contract(F.gelu(self.expand(self.norm_feed(x))))
        return x + added

    def _attend(self, x: Tensor) -> Tensor:
        q, k, v = (self._by_head(layer(x)) for layer in (self.q, self.k, self.v))
        mixed: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)

    def _by_head(self, columns: Tensor) -> Tensor:
        """Split this rank's columns into heads; a rank may have none."""
        heads: Tensor = columns.unflatten(-1, (columns.shape[-1] // self.head, self.head))
        return heads.transpose(1, 2)


class Gpt(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Embedding(size.window, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores

    def tensor_plan(self) -> Plan:
        """Attention by heads, feed-forward by columns, the vocabulary by words; norms and positions are replicated."""
        return {
            **{f"blocks.*.{name}": Columns(unit=self.size.head) for name in ("q", "k", "v")},
            "blocks.*.project": Rows(unit=self.size.head),
            "blocks.*.expand": Columns(),
            "blocks.*.contract": Rows(),
            "token": Words(),
            "head": Columns(gathers=True),
            "position": Places(),
        }


def size_of(name: str) -> Size:
    if name not in SIZES:
        raise InputError(f"--model {name!r} must be one of {', '.join(SIZES)}")
    return SIZES[name]
