import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import data

TEXT = "the quick brown fox jumps over the lazy dog while five boxing wizards watch the vexed zebras. " * 24
CHARS = sorted(set(TEXT))
CONTEXT, MICROS = 32, 2


class Windows(data.Dataset):
    def __init__(self, text):
        self.codes = torch.tensor([CHARS.index(char) for char in text])

    def __len__(self):
        return (len(self.codes) - 1) // 8 - CONTEXT // 8

    def __getitem__(self, place):
        window = self.codes[8 * place : 8 * place + CONTEXT + 1]
        return window[:-1], window[1:]


class CharGPT(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.token, self.place = nn.Embedding(len(CHARS), width), nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, 2, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(CHARS))

    def forward(self, codes):
        mask = nn.Transformer.generate_square_subsequent_mask(codes.shape[1], codes.device, self.head.weight.dtype)
        x = self.token(codes) + self.place(torch.arange(codes.shape[1], device=codes.device))
        return self.head(self.blocks(x, mask=mask, is_causal=True))


def loss_of(model, batch):
    codes, targets = batch
    return F.cross_entropy(model(codes).flatten(0, 1), targets.flatten())


@torch.no_grad()
def estimate_loss(model, windows):
    model.eval()
    loss = loss_of(model, [torch.stack(rows) for rows in zip(*[windows[place] for place in range(16)], strict=True)])
    model.train()
    return float(loss)


torch.manual_seed(0)
train, held_out = Windows(TEXT[:2081]), Windows(TEXT[2081:])
model = CharGPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
loader = data.DataLoader(train, batch_size=16, shuffle=True)

for epoch in range(4):
    for count, batch in enumerate(loader, start=1):
        (loss_of(model, batch) / MICROS).backward()
        if count % MICROS == 0:
            optimizer.step()
            optimizer.zero_grad()
            warmup.step()
        if count % 10 == 0:
            print(f"epoch {epoch + 1}: loss {estimate_loss(model, held_out):.3f}")

print(f"loss {estimate_loss(model, held_out):.3f}")
