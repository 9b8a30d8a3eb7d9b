"""A small net, its losses and batches of any size."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from uneven.step.eager import BeforeUpdate, EagerStep
from uneven.step.precision import Precision

CPU = torch.device("cpu")


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
}


def make_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4)).double()


def mean_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def loss_and_count(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts only the samples of a class other than 0, as a masked language model counts its tokens."""
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    mask = batch[1] != 0
    return (losses * mask).sum(), mask.sum()


def make_step(train_step: Any, optimizer: str, max_grad_norm: float | None = None) -> EagerStep:
    model = make_net()
    return EagerStep(
        model,
        OPTIMIZERS[optimizer](model.parameters()),
        train_step,
        Precision("fp32", CPU),
        BeforeUpdate(max_grad_norm=max_grad_norm),
    )


def batches(sizes: list[int], seed: int = 0) -> list[tuple[tuple[torch.Tensor, torch.Tensor], int]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            (
                torch.randn(n, 6, generator=generator, dtype=torch.float64),
                torch.randint(0, 4, (n,), generator=generator),
            ),
            n,
        )
        for n in sizes
    ]


def joined(parts: list[tuple[tuple[torch.Tensor, torch.Tensor], int]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([b[0] for b, _ in parts]), torch.cat([b[1] for b, _ in parts])
