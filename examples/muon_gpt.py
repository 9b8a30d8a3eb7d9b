"""A small GPT in the manner of nanochat, with MuonAdamW: uneven run examples/muon_gpt.py --devices cpu,cpu@0.4

Rotary positions, norms without params, a squared ReLU, no biases; Muon for the matrices of the blocks, AdamW for the
embedding and the head. Over several devices each one orthogonalises its own matrices, shared by speed.
"""

import torch
from torch import nn
from torch.nn import functional as F

from uneven import Ddp, MuonAdamW, TensorData, fit

ONES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
TENS = ["ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
TEXT = "".join(f"{TENS[n // 10 - 1]} {ONES[n % 10]}, " for n in range(10, 100))  # "ten zero, ten one, ..."
LETTERS = sorted(set(TEXT))
WIDTH, HEADS, WINDOW = 32, 2, 32
torch.set_num_threads(1)  # more of them only wait for each other at this size


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.expand, self.contract = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x, turn):
        samples, length, _ = x.shape
        q, k, v = self.qkv(norm(x)).view(samples, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(norm(rotate(q, turn)), norm(rotate(k, turn)), v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.contract(F.relu(self.expand(norm(x))).square())


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(len(LETTERS), WIDTH), nn.Linear(WIDTH, len(LETTERS), bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        nn.init.normal_(self.words.weight, std=0.5)
        half = WIDTH // HEADS // 2
        turn = torch.outer(torch.arange(WINDOW), 100.0 ** -(torch.arange(half) / half))
        self.register_buffer("turn", torch.stack((turn.cos(), turn.sin())), persistent=False)

    def forward(self, tokens):
        x = norm(self.words(tokens))
        for block in self.blocks:
            x = block(x, self.turn[:, : tokens.shape[1]])
        return self.head(norm(x))


def norm(x):
    return F.rms_norm(x, (x.shape[-1],))


def rotate(x, turn):
    (cos, sin), (first, second) = turn, x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def make_optimizer(params):
    """Matrices inside the blocks are Muon's; embedding and head have a row for each letter."""
    matrices, others = [], []
    for param in params:
        (matrices if len(LETTERS) not in param.shape else others).append(param)
    return MuonAdamW(
        [{"params": matrices, "kind": "muon", "lr": 0.04}, {"params": others, "kind": "adamw", "lr": 0.02}]
    )


def train_step(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


text = torch.tensor([LETTERS.index(letter) for letter in TEXT * 2])
windows = text.unfold(0, WINDOW + 1, 2).contiguous()
data = TensorData(windows)
state = fit(model=GPT, optimizer=make_optimizer, step=train_step, dataset=data, batch_size=32, epochs=2)

if Ddp.rank() == 0:
    model = state.load_into(GPT())
    right = (model(windows[:, :-1]).argmax(-1) == windows[:, 1:])[:, WINDOW // 2 :].float().mean()
    print(f"letters predicted from what stands before them {right:.3f}")
