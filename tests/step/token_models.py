"""Language models with padded batches, and their losses."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uneven.step.loss import IGNORED

WORDS = 11


LENGTHS = (3, 9, 5, 8, 4, 9, 2, 7)


class Language(nn.Module):
    """Returns an output with loss and logits, as transformers' models do; with BatchNorm and dropout."""

    def __init__(self, *, is_shifted: bool = True, is_mapping: bool = False) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(5)
        self.embedding = nn.Embedding(WORDS, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, WORDS))
        self.is_shifted, self.is_mapping = is_shifted, is_mapping
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=own) * 0.5)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        hidden = self.norm(self.embedding(ids).transpose(1, 2)).transpose(1, 2)
        scores = self.head(hidden.cumsum(1) if attention_mask is None else (hidden * attention_mask[..., None]))
        if labels is None:
            return scores
        shifted = (scores[:, :-1], labels[:, 1:]) if self.is_shifted else (scores, labels)
        wide = shifted[0].flatten(0, 1).to(torch.promote_types(scores.dtype, torch.float32))
        loss = F.cross_entropy(wide, shifted[1].flatten(), ignore_index=IGNORED)
        return {"loss": loss, "logits": scores} if self.is_mapping else SimpleNamespace(loss=loss, logits=scores)


def padded(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> dict[str, Tensor]:
    own = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (len(lengths), max(lengths)), generator=own)
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    return {"ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, IGNORED)}


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss  # type: ignore[no-any-return]


def masked_losses(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    scores, mask = model(batch["ids"]), batch["attention_mask"]
    return F.cross_entropy(scores.transpose(1, 2), batch["ids"], reduction="none") * mask, mask


def sample_mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    losses, mask = masked_losses(model, batch)
    return (losses.sum(1) / mask.sum(1)).mean()


def contrastive(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    mask = batch["attention_mask"][..., None]
    one = F.normalize((model(batch["ids"]) * mask).sum(1) / mask.sum(1), dim=1)
    return F.cross_entropy(one @ one.flip(1).T / 0.1, torch.arange(len(one)))
