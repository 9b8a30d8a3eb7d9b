"""A two-layer LSTM over characters of Shakespeare: recurrence, and a step that cannot be split in time."""

import torch
from torch import Tensor, nn

from uneven.bench.models.recipe import Published, Recipe, evaluate_next, predict_next

VOCABULARY = 65  # tiny Shakespeare


class CharRnn(nn.Module):
    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 128)
        self.lstm = nn.LSTM(128, 256, num_layers=2, batch_first=True)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(256, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        scores: Tensor = self.head(self.dropout(hidden))
        return scores


RECIPE = Recipe(
    name="char-rnn",
    title="character LSTM",
    data="shakespeare",
    epochs=50,
    num_params=946_625,
    make_model=CharRnn,
    make_optimizer=lambda params: torch.optim.RMSprop(params, lr=2e-3),
    train_step=predict_next,
    eval_step=evaluate_next,
    metric="loss",
    higher_is_better=False,
    published=Published(1.5, "Karpathy 2015, char-rnn on tiny Shakespeare, about 1.5", worst=1.6, is_best=True),
)
