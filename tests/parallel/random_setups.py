"""Random set-ups of strategies, each trained on some ranks and in one process: models, buckets, shares, samples.

A set-up is drawn from its seed alone, so that all ranks draw the same one.
"""

import itertools
import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.parallel.parity import OPTIMIZERS, assert_same_state
from uneven.comm.group import Group
from uneven.comm.torch_group import as_group
from uneven.parallel import FSDP, DDPBucketed, DDPFlat, Strategy, Zero1, Zero2
from uneven.parallel.strategy import FullState
from uneven.policy.apportion import apportion

STEPS, CLIP = 3, 0.5
BUCKETS_MB = (0, 1e-4, 1e-3, 0.01, None, 25)


@dataclass(frozen=True)
class Setup:
    strategy: str
    ranks: int
    blocks: int
    width: int
    kind: str
    segment: int  # blocks in a checkpoint; 0 is none, below 0 on even ranks alone
    bucket_mb: float | None
    shares: tuple[float, ...]  # of the state
    optimizer: str
    samples: tuple[tuple[tuple[int, ...], ...], ...]  # by step, micro-batch and rank

    @classmethod
    def drawn(cls, seed: int, ranks: int) -> "Setup":
        own = random.Random(seed)
        blocks = own.choice((2, 3, 4, 5, 6, 12, own.randint(2, 40)))
        strategy = own.choice(("ddp", "ddp, bucketed", "zero1", "zero2", "zero2", "fsdp", "fsdp", "fsdp"))
        micros = own.choice((1, 1, 2))
        return cls(
            strategy,
            ranks,
            blocks,
            own.randint(1, 12),
            own.choice(("plain", "gated", "frozen", "adapted", "branches")),
            own.choice((0, 0, 1, 4, -1, -3)),
            own.choice(BUCKETS_MB),
            _shares(own, ranks),
            own.choice(sorted(OPTIMIZERS)),
            tuple(
                tuple(tuple(apportion(own.randint(1, 9), _shares(own, ranks))) for _ in range(micros))
                for _ in range(STEPS)
            ),
        )


def _shares(own: random.Random, ranks: int) -> tuple[float, ...]:
    """Often with zeros, never all of them."""
    shares = [own.choice((0, 0, 1, 2, 7)) for _ in range(ranks)]
    shares[own.randrange(ranks)] = own.randint(1, 5)
    return tuple(map(float, shares))


class Block(nn.Module):
    def __init__(self, setup: Setup, number: int) -> None:
        super().__init__()
        width = setup.width
        self.inner = nn.Linear(width, width)
        # Only for some samples: a rank may have none of them in a step, and its layer no gradient.
        self.gated = nn.Linear(width, width) if setup.kind == "gated" and number % 2 else None
        if setup.kind == "frozen" and number % 3:
            self.inner.weight.requires_grad_(False)
            self.inner.bias.requires_grad_(number % 3 == 1)
        if setup.kind == "adapted" and number < setup.blocks - 1:  # nothing is trained in the lower half
            self.inner.requires_grad_(False)
            self.inner.bias.requires_grad_(number > setup.blocks // 2 and number % 2 == 0)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        hidden: Tensor = x + 0.2 * torch.tanh(self.inner(x))
        if self.gated is not None and bool(gate.any()):
            hidden = hidden + gate * torch.tanh(self.gated(x))
        return hidden


class Net(nn.Module):
    def __init__(self, setup: Setup, rank: int = 0) -> None:
        super().__init__()
        self.setup = setup
        self.segment = setup.segment if rank % 2 else abs(setup.segment)
        self.first, self.last = nn.Linear(3, setup.width), nn.Linear(setup.width, 2)
        self.blocks = nn.ModuleList(Block(setup, number) for number in range(setup.blocks))
        if setup.kind == "adapted":
            self.first.requires_grad_(False)
            self.last.requires_grad_(False)
        self.double()
        own = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=own, dtype=torch.float64) * 0.4)

    def forward(self, x: Tensor) -> Tensor:
        gate = (x[:, :1] > 0.8).to(x.dtype)
        hidden = torch.tanh(self.first(x))
        if self.setup.kind == "branches":  # backward comes to the first half while the second waits, or after it
            half = self.setup.blocks // 2
            left, right = self._through(0, half, hidden, gate), self._through(half, self.setup.blocks, hidden, gate)
            hidden = left * right
        else:
            size = self.segment if self.segment > 0 else self.setup.blocks
            for begin in range(0, self.setup.blocks, size):
                end = min(begin + size, self.setup.blocks)
                if self.segment > 0:
                    hidden = checkpoint(self._through, begin, end, hidden, gate, use_reentrant=False)
                else:
                    hidden = self._through(begin, end, hidden, gate)
        scores: Tensor = self.last(hidden)
        return scores

    def _through(self, begin: int, end: int, x: Tensor, gate: Tensor) -> Tensor:
        for block in list(self.blocks)[begin:end]:
            x = block(x, gate)
        return x


def wrapped(setup: Setup, group: Group) -> Strategy:
    model, make = Net(setup, group.rank), OPTIMIZERS[setup.optimizer]
    options: dict[str, Any] = {"shares": setup.shares, "bucket_mb": setup.bucket_mb}
    if setup.strategy == "ddp":
        return DDPFlat(model, make, group)
    if setup.strategy == "ddp, bucketed":
        return DDPBucketed(model, make, group, bucket_mb=setup.bucket_mb)
    kinds: dict[str, Any] = {"zero1": Zero1, "zero2": Zero2, "fsdp": FSDP}
    strategy: Strategy = kinds[setup.strategy](model, make, group, **options)
    return strategy


def batches(setup: Setup) -> Iterator[list[tuple[list[Tensor], int]]]:
    """By step: of every micro-batch the ranks' rows, and how many samples the step has."""
    own = torch.Generator().manual_seed(5)
    for micros in setup.samples:
        total = sum(map(sum, micros))
        yield [
            (list(torch.randn(sum(counts), 3, generator=own, dtype=torch.float64).split(counts)), total)
            for counts in micros
        ]


def train_dense(setup: Setup) -> tuple[FullState, list[float]]:
    model = Net(setup)
    optimizer = OPTIMIZERS[setup.optimizer](model.parameters())
    norms = []
    for micros in batches(setup):
        for parts, total in micros:
            (model(torch.cat(parts)).square().sum() / total).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return FullState(dict(model.state_dict()), optimizer.state_dict()), norms


def train_on(setup: Setup, group: Group) -> tuple[FullState, list[float]]:
    strategy = wrapped(setup, group)
    norms = []
    for micros in batches(setup):
        for place, (parts, total) in enumerate(micros):
            rows = parts[group.rank]
            with nullcontext() if place == len(micros) - 1 else strategy.no_sync():
                if len(rows):
                    (strategy.module(rows).square().sum() / total).backward()
                else:
                    strategy.backward_without_samples()
        norms.append(float(strategy.clip(CLIP)))
        strategy.optimizer.step()
        strategy.optimizer.zero_grad()
    state = strategy.full_state()
    strategy.close()
    return state, norms


def check(setup: Setup, group: Group) -> None:
    state, norms = train_on(setup, group)
    dense, expected = train_dense(setup)
    torch.testing.assert_close(norms, expected, rtol=1e-9, atol=1e-11)
    assert_same_state(state, dense, 1e-9)


def check_all(group: Group, seeds: range) -> list[str]:
    """What failed on this rank; a process group of some of the ranks takes turns with the group of all."""
    failed = []
    size = group.world_size
    members = [some for many in range(2, size) for some in itertools.combinations(range(size), many)]
    for seed in seeds:
        some = members[seed % len(members)] if members and seed % 4 == 3 else ()
        ours = as_group(dist.new_group(list(some))) if some and group.rank in some else group
        if some and group.rank not in some:
            dist.new_group(list(some))
            continue
        setup = Setup.drawn(seed, ours.world_size)
        try:
            check(setup, ours)
        except Exception as error:
            failed.append(f"seed {seed}, rank {group.rank}: {setup}: {type(error).__name__}: {error}")
    return failed
