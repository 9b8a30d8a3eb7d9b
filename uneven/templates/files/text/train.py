"""A small GPT that continues a text character by character. Start it by: uneven run train.py"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uneven import Ddp, TensorData, TrainedState, fit

TEXT = Path(__file__).with_name("text.txt").read_text("utf-8")  # put any text of yours in its place
CHARS = sorted(set(TEXT))
CONTEXT = 64  # how many characters the model sees
Batch = tuple[Tensor, Tensor]


def encode(text: str) -> Tensor:
    return torch.tensor([CHARS.index(char) for char in text])


def make_windows(text: str, stride: int = 8) -> TensorData:
    """Every `stride` characters a window; the target of each character is the next one."""
    windows = encode(text).unfold(0, CONTEXT + 1, stride)
    return TensorData(windows[:, :-1], windows[:, 1:])


class CharGPT(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(len(CHARS), width), nn.Embedding(CONTEXT, width)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(CHARS))

    def forward(self, codes: Tensor) -> Tensor:
        x = self.token(codes) + self.place(torch.arange(codes.shape[1], device=codes.device))
        mask = nn.Transformer.generate_square_subsequent_mask(codes.shape[1], x.device, x.dtype)
        scores: Tensor = self.head(self.blocks(x, mask=mask, is_causal=True))
        return scores


def train_step(model: nn.Module, batch: Batch) -> Tensor:
    """The mean loss of a batch; uneven calls backward and steps the optimizer."""
    codes, targets = batch
    return F.cross_entropy(model(codes).flatten(0, 1), targets.flatten())


def eval_step(model: nn.Module, batch: Batch) -> tuple[dict[str, Tensor], int]:
    """Sums over a batch of the text that is held out, and the number of its windows."""
    return {"loss": train_step(model, batch) * len(batch[0])}, len(batch[0])


@torch.no_grad()
def write_on(model: nn.Module, text: str, characters: int = 200) -> str:
    for _ in range(characters):
        scores = model(encode(text[-CONTEXT:]).unsqueeze(0))[0, -1]
        text += CHARS[int(torch.multinomial(scores.softmax(0), 1))]
    return text


def train(**settings: Any) -> TrainedState:
    """Train on the devices of run.toml; more settings may be given here, as in train(max_steps=10)."""
    cut = int(0.9 * len(TEXT))
    return fit(
        model=CharGPT,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        step=train_step,
        dataset=make_windows(TEXT[:cut]),
        evaluate=(make_windows(TEXT[cut:], CONTEXT), eval_step),
        batch_size=32,  # per device
        epochs=4,
        **settings,
    )


if __name__ == "__main__":
    state = train()
    if Ddp.rank() == 0:
        print(write_on(state.load_into(CharGPT()).eval(), TEXT[:CONTEXT]))
