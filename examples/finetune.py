"""A small encoder fine-tuned to classify sentences of different lengths, which a collate function pads."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from uneven import fit

WORDS, CLASSES, PADDING = 120, 4, 0


def make_sentences(many, seed):
    """Made-up sentences: most words of a sentence belong to its class, a quarter are noise."""
    generator = torch.Generator().manual_seed(seed)
    sentences = []
    for label in torch.randint(CLASSES, (many,), generator=generator).tolist():
        length = int(torch.randint(4, 20, (1,), generator=generator))
        topic = 1 + label * 29 + torch.randint(29, (length,), generator=generator)
        noise = torch.randint(1, WORDS, (length,), generator=generator)
        sentences.append((torch.where(torch.rand(length, generator=generator) < 0.25, noise, topic), label))
    return sentences


def pad(samples):
    sentences, labels = zip(*samples, strict=True)
    tokens = pad_sequence(list(sentences), batch_first=True, padding_value=PADDING)
    return {"tokens": tokens, "mask": tokens == PADDING, "labels": torch.tensor(labels)}


class Classifier(nn.Module):
    """The encoder would come with its weights; only its last layer and the head are trained."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32, padding_idx=PADDING)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, CLASSES)
        for frozen in (self.embedding, self.encoder.layers[0]):
            frozen.requires_grad_(False)

    def forward(self, batch):
        hidden = self.encoder(self.embedding(batch["tokens"]), src_key_padding_mask=batch["mask"])
        words = ~batch["mask"].unsqueeze(2)
        return self.head((hidden * words).sum(1) / words.sum(1))


def loss_of(model, batch):
    return F.cross_entropy(model(batch), batch["labels"])


def adamw(params):
    return torch.optim.AdamW(params, lr=5e-3)


train_set, test_set = make_sentences(600, seed=1), make_sentences(200, seed=2)
shuffled = torch.Generator().manual_seed(0)
train_loader = DataLoader(train_set, batch_size=20, shuffle=True, collate_fn=pad, generator=shuffled)
test_loader = DataLoader(test_set, batch_size=100, collate_fn=pad)

state = fit(model=Classifier, optimizer=adamw, step=loss_of, dataset=train_loader, epochs=2)
model = state.load_into(Classifier())

model.eval()
with torch.no_grad():
    right = sum((model(batch).argmax(1) == batch["labels"]).sum() for batch in test_loader)
print(f"accuracy {right / len(test_set):.3f}")
