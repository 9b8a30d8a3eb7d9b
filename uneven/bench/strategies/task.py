"""The task that every row of `uneven bench strategies` trains: a model made from a seed, batches from their numbers.

Used by rank.py. Invariant: losses and params of two rows differ by rounding only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from uneven.bench.models import gpt, gpt_nano
from uneven.comm.group import Group
from uneven.config import MODEL_PARALLEL, SHARDED, STRATEGIES
from uneven.parallel.catalog import make_strategy, plan_of
from uneven.parallel.muon_adamw import MuonAdamW
from uneven.parallel.reference import TorchFsdp, TorchReplicated, TorchTensor
from uneven.parallel.strategy import FullState, on_host
from uneven.policy.apportion import apportion, cut_by

DENSE = "dense"
MUON, MUON_ALONE = "muon", "muon-1"
TORCHS = ("torch-ddp", "torch-zero1", "torch-fsdp", "torch-tensor")
ROWS = (DENSE, *STRATEGIES, *TORCHS, MUON_ALONE, MUON)
REDUNDANT = [row for row in SHARDED if row not in MODEL_PARALLEL]  # rows whose shards can have copies
ALONE = {DENSE, MUON_ALONE}  # rows of one rank, which the others are compared with
BATCH = 8  # samples of all ranks together
LR, MUON_LR = 1e-3, 0.02
SEED = 0


@dataclass(frozen=True)
class StrategyTask:
    """The work of all ranks of a row. With `against`, this row and that one train alternating segments of `steps`."""

    row: str
    model: str
    ranks: int
    shares: list[float] | None
    steps: int
    device: str
    cores: list[list[int]]
    threads: list[int]
    home: str  # the folder with the states of the rows of one rank
    against: str | None = None
    pairs: int = 0
    redundancy: int = 0  # of the rows that can have it


class Trained(Protocol):
    """The part of the Strategy protocol that the benchmark needs."""

    module: nn.Module

    @property
    def optimizer(self) -> Optimizer: ...
    def full_state(self) -> FullState: ...


@dataclass
class Plain:
    """A model and an optimizer without a strategy: one rank alone, or MuonAdamW, which sums gradients itself."""

    module: nn.Module
    optimizer: Optimizer

    def full_state(self) -> FullState:
        return FullState(on_host(dict(self.module.state_dict())), self.optimizer.state_dict())


def reference_of(row: str) -> str:
    """The row of one rank that trains the same model on the same batches."""
    return MUON_ALONE if row in (MUON, MUON_ALONE) else DENSE


def make_model(row: str, size: str) -> nn.Module:
    """The same values on every rank and in every row; without dropout."""
    torch.manual_seed(SEED)
    if reference_of(row) == MUON_ALONE:
        return gpt_nano.GptNano().eval()
    return gpt.Gpt(gpt.size_of(size))


def make_trained(
    row: str, model: nn.Module, group: Group, shares: Sequence[float] | None, redundancy: int = 0
) -> Trained:
    if row in STRATEGIES:
        return make_strategy(row, model, make_adamw, group, shares, redundancy=redundancy if row in REDUNDANT else 0)
    if row == "torch-fsdp":
        return TorchFsdp(model, make_adamw, group)
    if row == "torch-tensor":
        return TorchTensor(model, make_adamw, group, plan=plan_of(row, model))
    if row in TORCHS:
        return TorchReplicated(model, make_adamw, group, is_sharded=row == "torch-zero1")
    if row == DENSE:
        return Plain(model, make_adamw(model.parameters()))
    matrices, others = by_kind(model)
    kinds = [{"params": matrices, "kind": "muon", "lr": MUON_LR}, {"params": others, "kind": "adamw", "lr": LR}]
    return Plain(model, MuonAdamW(kinds, group, memory=shares))


def make_adamw(params: Any) -> Optimizer:
    return AdamW(params, lr=LR)


def by_kind(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices inside the blocks, for Muon, and all other params, for AdamW."""
    named = list(model.named_parameters())
    matrices = [param for name, param in named if name.startswith("blocks.") and param.dim() == 2]
    chosen = set(matrices)
    return matrices, [param for _, param in named if param not in chosen]


class Batches:
    """Random tokens, seeded by the batch's number. `is_split`: each rank trains its own rows of a batch, not all."""

    def __init__(self, row: str, size: str, group: Group, device: torch.device) -> None:
        if reference_of(row) == MUON_ALONE:
            self._vocabulary, self._window = gpt_nano.VOCABULARY, gpt_nano.WINDOW
        else:
            self._vocabulary, self._window = gpt.size_of(size).vocabulary, gpt.size_of(size).window
        self.is_split = row not in (*MODEL_PARALLEL, "torch-tensor")
        bounds = cut_by(apportion(BATCH, [1.0] * group.world_size))
        self._own = slice(bounds[group.rank], bounds[group.rank + 1]) if self.is_split else slice(None)
        self._device = device

    def loss(self, module: nn.Module, number: int) -> Tensor:
        """This rank's part of the batch's mean loss; without `is_split`, all of it."""
        generator = torch.Generator().manual_seed(1000 + number)
        tokens = torch.randint(self._vocabulary, (BATCH, self._window + 1), generator=generator)
        own = tokens[self._own].to(self._device)
        scores = module(own[:, :-1])
        return F.cross_entropy(scores.flatten(0, 1), own[:, 1:].flatten(), reduction="sum") / (BATCH * self._window)


def step(trained: Trained, batches: Batches, number: int, backward: Callable[[Tensor], None] | None = None) -> Tensor:
    """One optimizer step; gradients stay, so that their memory can be measured. `backward` replaces loss.backward."""
    trained.optimizer.zero_grad()
    loss = batches.loss(trained.module, number)
    loss.backward() if backward is None else backward(loss)
    trained.optimizer.step()
    return loss.detach()
