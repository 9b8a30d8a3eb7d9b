"""A vision transformer, ViT-B/16, for images of 224 x 224 pixels, on random ones; for its speed.

Params have the names and shapes of torchvision's vit_b_16 (tests/bench/models/test_large.py).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uneven.bench.models.recipe import Recipe

WIDTH = 768
BLOCKS = 12
HEADS = 12
PATCH = 16
PIXELS = 224
CLASSES = 1000


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH, eps=1e-6)
        self.self_attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.ln_2 = nn.LayerNorm(WIDTH, eps=1e-6)
        # The places of torchvision's, which has dropout at 2 and 4.
        self.mlp = nn.ModuleDict({"0": nn.Linear(WIDTH, 4 * WIDTH), "3": nn.Linear(4 * WIDTH, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        normed = self.ln_1(x)
        x = x + self.self_attention(normed, normed, normed, need_weights=False)[0]
        added: Tensor = self.mlp["3"](F.gelu(self.mlp["0"](self.ln_2(x))))
        return x + added


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        places = (PIXELS // PATCH) ** 2 + 1
        self.pos_embedding = nn.Parameter(0.02 * torch.randn(1, places, WIDTH))
        self.layers = nn.ModuleDict({f"encoder_layer_{place}": Block() for place in range(BLOCKS)})
        self.ln = nn.LayerNorm(WIDTH, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.pos_embedding
        for block in self.layers.values():
            x = block(x)
        last: Tensor = self.ln(x)
        return last


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.conv_proj = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.encoder = Encoder()
        self.heads = nn.ModuleDict({"head": nn.Linear(WIDTH, CLASSES)})

    def forward(self, images: Tensor) -> Tensor:
        patches = self.conv_proj(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(images), -1, -1), patches], 1)
        scores: Tensor = self.heads["head"](self.encoder(x)[:, 0])
        return scores


VIT_B16 = Recipe(
    name="vit-b16",
    title="ViT-B/16",
    data="random-224",
    batch_size=64,
    epochs=1,
    num_params=86_567_656,
    make_model=VisionTransformer,
    make_optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1),
)
