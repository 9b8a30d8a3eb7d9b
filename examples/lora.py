"""A Llama-shaped model with LoRA, its frozen weights divided by memory: uneven run examples/lora.py

No device ever holds all of the model: it is made shard by shard, and each block is gathered while it computes. With
peft installed the adapters are its own, else the small layer below. Put your model and tokens in place of these.
"""

import torch
from torch import nn
from torch.nn import functional as F

from uneven import TensorData, fit

CONFIG = {"width": 320, "inner": 864, "layers": 10, "heads": 8, "words": 512}  # 53 MB in fp32
WINDOW, RANK = 16, 4
ADAPTED = ["q", "v", "o", "down"]
torch.set_num_threads(1)  # more of them only wait for each other at this size


class Block(nn.Module):
    """Norm, attention with rotary positions, norm, SwiGLU."""

    def __init__(self, config):
        super().__init__()
        width, inner = config["width"], config["inner"]
        self.heads = config["heads"]
        self.norm, self.norm_feed = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.v, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x, turn):
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(rotate(q, turn), rotate(k, turn), v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        y = self.norm_feed(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.words = nn.Embedding(config["words"], config["width"])
        self.blocks = nn.ModuleList(Block(config) for _ in range(config["layers"]))
        self.norm = nn.RMSNorm(config["width"])
        self.head = nn.Linear(config["width"], config["words"], bias=False)
        half = config["width"] // config["heads"] // 2
        turn = torch.outer(torch.arange(WINDOW), 10000.0 ** -(torch.arange(half) / half))
        self.register_buffer("turn", torch.stack((turn.cos(), turn.sin())), persistent=False)

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x, self.turn[:, : tokens.shape[1]])
        return self.head(self.norm(x))


def rotate(x, turn):
    (cos, sin), (first, second) = turn, x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class LoRA(nn.Module):
    """A frozen layer with a trained update of low rank."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def make_model():
    model = Llama(CONFIG).requires_grad_(False)
    try:
        from peft import LoraConfig, inject_adapter_in_model

        return inject_adapter_in_model(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=ADAPTED), model)
    except ImportError:
        for block in model.blocks:
            for name in ADAPTED:
                setattr(block, name, LoRA(getattr(block, name)))
        return model


def make_optimizer(params):
    return torch.optim.AdamW([param for param in params if param.requires_grad], lr=1e-2)


def make_tokens(samples):
    """Each sample counts on from a word in steps of its own."""
    own = torch.Generator().manual_seed(1)
    first, step = torch.randint(0, CONFIG["words"], (2, samples, 1), generator=own)
    return (first + (step % 2) * torch.arange(WINDOW)) % CONFIG["words"]


def train_step(model, tokens):
    scores = model(tokens[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


if __name__ == "__main__":
    state = fit(
        model=make_model,
        optimizer=make_optimizer,
        step=train_step,
        dataset=TensorData(make_tokens(128)),
        batch_size=8,
        epochs=2,
        devices="cpu,cpu@0.4",
        policy="balanced",
        strategy="fsdp",
    )
    print(f"loss {state.history[0]['train_loss']:.3f} -> {state.history[-1]['train_loss']:.3f}")
