"""GPT-2 with 124 million params over characters of Shakespeare, and a smaller one for CPUs; for their speed.

Params have the names and shapes of the state dict of transformers' GPT2LMHeadModel, so either can load the other's
(tests/bench/models/test_large.py). There is no dropout, as in today's pretraining.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uneven.bench.models.recipe import Recipe, evaluate_next, predict_next


@dataclass(frozen=True)
class Size:
    width: int = 768
    blocks: int = 12
    heads: int = 12
    vocabulary: int = 50_257
    window: int = 1024  # the longest text


class Conv1D(nn.Module):
    """A linear layer whose weight is transposed, as the published checkpoints have it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.T, self.bias)


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.c_attn = Conv1D(size.width, 3 * size.width)
        self.c_proj = Conv1D(size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.c_proj(mixed.transpose(1, 2).flatten(2))
        return projected


class FeedForward(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.c_fc = Conv1D(size.width, 4 * size.width)
        self.c_proj = Conv1D(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        contracted: Tensor = self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))
        return contracted


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(size.width)
        self.attn = Attention(size)
        self.ln_2 = nn.LayerNorm(size.width)
        self.mlp = FeedForward(size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        added: Tensor = self.mlp(self.ln_2(x))
        return x + added


class Transformer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.wte = nn.Embedding(size.vocabulary, size.width)
        self.wpe = nn.Embedding(size.window, size.width)
        self.h = nn.ModuleList(Block(size) for _ in range(size.blocks))
        self.ln_f = nn.LayerNorm(size.width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        last: Tensor = self.ln_f(x)
        return last


class Gpt2(nn.Module):
    """The embedding of tokens is also the last layer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.transformer = Transformer(size)
        self.lm_head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        for name, param in self.named_parameters():
            if param.ndim == 2:  # projections onto the residual stream are smaller, one for each of their number
                nn.init.normal_(param, std=0.02 / (2 * size.blocks) ** 0.5 if "c_proj" in name else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.lm_head(self.transformer(tokens))
        return scores


GPT2_SIZE = Size()
SMALL_SIZE = Size(width=512, blocks=8, heads=8, vocabulary=256, window=256)


def make_gpt2(vocabulary: int = GPT2_SIZE.vocabulary) -> nn.Module:
    del vocabulary  # characters of the text are the first of its own 50,257 tokens
    return Gpt2(GPT2_SIZE)


def make_small(vocabulary: int = SMALL_SIZE.vocabulary) -> nn.Module:
    del vocabulary
    return Gpt2(SMALL_SIZE)


def adamw(params: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)  # type: ignore[arg-type]


GPT2 = Recipe(
    name="gpt2",
    title="GPT-2",
    data="shakespeare-512",
    batch_size=8,
    epochs=1,
    num_params=124_439_808,
    make_model=make_gpt2,
    make_optimizer=adamw,
    train_step=predict_next,
    eval_step=evaluate_next,
    metric="loss",
    higher_is_better=False,
)

GPT_25M = replace(
    GPT2,
    name="gpt-25m",
    title="GPT-2 with 25 million params",
    data="shakespeare",
    num_params=25_482_240,
    make_model=make_small,
)
