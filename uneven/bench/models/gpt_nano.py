"""A small transformer over characters of Shakespeare: attention, Adam, a learning rate with warm-up and cosine."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from uneven.bench.models.recipe import Published, Recipe, evaluate_next, predict_next

VOCABULARY = 65  # tiny Shakespeare
WIDTH = 128
HEADS = 4
WINDOW = 128
DROPOUT = 0.1
PEAK_LR, LAST_LR = 3e-4, 1e-5
WARMUP_SHARE = 0.2


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.norm_feed = nn.LayerNorm(WIDTH)
        self.expand = nn.Linear(WIDTH, 4 * WIDTH)
        self.contract = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.project(self._attend(self.norm_attention(x))))
        added: Tensor = self.dropout(self.contract(F.gelu(self.expand(self.norm_feed(x)))))
        return x + added

    def _attend(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        q, k, v = self.qkv(x).view(samples, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        dropout = DROPOUT if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return mixed.transpose(1, 2).reshape(samples, length, width)


class GptNano(nn.Module):
    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, WIDTH)
        self.position = nn.Embedding(WINDOW, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token(tokens) + self.position(positions))
        scores: Tensor = self.head(self.norm(self.blocks(x)))
        return scores


def make_scheduler(optimizer: Optimizer, total_steps: int) -> LambdaLR:
    warmup = max(1, round(WARMUP_SHARE * total_steps))
    floor = LAST_LR / PEAK_LR

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        return floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2

    return LambdaLR(optimizer, factor)


RECIPE = Recipe(
    name="gpt-nano",
    title="4-block character transformer",
    data="shakespeare",
    epochs=50,
    num_params=826_433,
    make_model=GptNano,
    make_optimizer=lambda params: torch.optim.Adam(params, lr=PEAK_LR),
    make_scheduler=make_scheduler,
    train_step=predict_next,
    eval_step=evaluate_next,
    metric="loss",
    higher_is_better=False,
    published=Published(2.0, "small character transformers on tiny Shakespeare, 1.5 to 2.0", worst=2.0, is_best=True),
)
