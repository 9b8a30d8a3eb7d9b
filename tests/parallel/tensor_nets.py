"""Nets whose layers are cut."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parallel.parity import OPTIMIZERS
from uneven.comm.group import Group
from uneven.parallel.strategy import FullState
from uneven.parallel.tensor_parallel import Columns, Places, Rows, SequenceParallel, TensorParallel, Words

WORDS, HEADS, HEAD, WIDTH, INNER, LENGTH, ROWS = 11, 4, 3, 12, 10, 5, 4


CLIP = 0.3


NOISE = 1e-9  # a key's bias has no gradient but rounding, which Adam turns into steps


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.expand, self.contract = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = len(self.qkv.weight) // (3 * HEAD)  # this rank's; there may be none
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, heads, HEAD)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        added: Tensor = self.contract(F.gelu(self.expand(self.norm2(x))))
        return x + added


class Gpt(nn.Module):
    def __init__(self, is_tied: bool = False, seed: int = 3) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=not is_tied)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.double()
        own = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                tensor.copy_(torch.randn(tensor.shape, generator=own, dtype=torch.float64) * 0.3)
        if is_tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        assert isinstance(self.scale, Tensor)
        x = (self.token(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))) * self.scale
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(x)
        return scores


PLAN: dict[str, Any] = {
    "*.qkv": Columns(unit=HEAD, parts=3),
    "*.project": Rows(unit=HEAD),
    "*.expand": Columns(),
    "*.contract": Rows(),
    "token": Words(),
    "head": Columns(gathers=True),
    "places": Places(),
}


KINDS = {"tensor": TensorParallel, "sequence": SequenceParallel}


def tokens(step: int) -> Tensor:
    return torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def loss_of(scores: Tensor, step: int) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), tokens(step + 100).flatten().to(scores.device))


def dense(optimizer: str, is_tied: bool, steps: int = 3) -> tuple[FullState, list[float]]:
    model = Gpt(is_tied)
    made = OPTIMIZERS[optimizer](model.parameters())
    norms = []
    for step in range(steps):
        loss_of(model(tokens(step)), step).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        made.step()
        made.zero_grad()
    return FullState(dict(model.state_dict()), made.state_dict()), norms


def train(
    group: Group,
    kind: str,
    optimizer: str,
    is_tied: bool,
    shares: Any,
    steps: range = range(3),
    state: FullState | None = None,
    device: str = "cpu",
    **options: Any,
) -> tuple[FullState, list[float]]:
    model = Gpt(is_tied, seed=3 + group.rank).to(device)
    strategy = KINDS[kind](model, OPTIMIZERS[optimizer], group, plan=PLAN, shares=shares, **options)
    if state is not None:
        strategy.load_full_state(state)
    norms = []
    for step in steps:
        loss_of(strategy.module(tokens(step).to(device)), step).backward()
        norms.append(float(strategy.clip(CLIP)))
        strategy.optimizer.step()
        strategy.optimizer.zero_grad()
    return strategy.full_state(), norms
