"""Tasks of runs with strategies."""

import json
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uneven.parallel.tensor_parallel import Columns, Places, Plan, Rows, Words
from uneven.results.state import TrainedState

WORDS, WIDTH = 7, 8


def assert_same_optimizer(ours: TrainedState, dense: TrainedState) -> None:
    found = {name for name in dense.optimizer if not name.startswith("random.")}
    assert {name for name in ours.optimizer if not name.startswith("random.")} == found
    for name in found:
        torch.testing.assert_close(ours.optimizer[name], dense.optimizer[name], rtol=1e-10, atol=1e-10)
    # As they are saved: pairs of numbers become lists on the way from a process.
    assert json.dumps(ours.param_groups) == json.dumps(dense.param_groups)


class Reader(nn.Module):
    """Tokens in, scores of the next ones out: the least that can be cut by rows of a sequence."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(6, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        own = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=own) * 0.3)
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        scores: Tensor = self.head(x + self.narrow(torch.tanh(self.wide(self.norm(x)))))
        return scores

    def fsdp_units(self) -> list[nn.Module]:
        return [self.words, self.wide, self.narrow]

    def tensor_plan(self) -> Plan:
        return {
            "words": Words(),
            "places": Places(),
            "wide": Columns(),
            "narrow": Rows(),
            "head": Columns(gathers=True),
        }


def next_token(model: nn.Module, tokens: Any) -> Tensor:

    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
