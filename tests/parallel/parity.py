"""Strategies against one process: the same batches, and every param, buffer, optimizer state and norm compared."""

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.ranks import on_threads
from uneven.comm.group import Group
from uneven.parallel.ddp import DDPBucketed, DDPFlat, Zero2
from uneven.parallel.fsdp import FSDP
from uneven.parallel.sharded_optimizer import ShardedOptimizer
from uneven.parallel.strategy import FullState, MakeOptimizer, Strategy
from uneven.policy.apportion import apportion, cut_by

STEPS, SAMPLES, CLIP = 3, 12, 0.4
KINDS = ("plain", "tied", "frozen", "unused", "buffers", "channels_last")
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=1e-2),
}
Wrap = Callable[[nn.Module, MakeOptimizer, Group], Strategy]


class Net(nn.Module):
    """Has every kind of layer and param that is hard to shard, sum or offload."""

    def __init__(self, kind: str, rank: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.kind = kind
        self.conv = nn.Conv2d(2, 3, 3, padding=1)
        self.embedding = nn.Embedding(7, 5)
        self.inner = nn.Linear(5, 5)
        self.twice = nn.Linear(5, 5, bias=False)
        self.head = nn.Linear(5, 7, bias=kind != "tied")
        self.unused = nn.Linear(2, 2) if kind == "unused" else None
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("scale", torch.ones(3))
        self.to(dtype)
        own = torch.Generator().manual_seed(1 + rank)  # only rank 0's may count
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                tensor.copy_(torch.randn(tensor.shape, generator=own, dtype=torch.float64) * 0.4)
        if kind == "tied":
            self.head.weight = self.embedding.weight
        if kind == "frozen":
            self.inner.weight.requires_grad_(False)
            self.embedding.weight.requires_grad_(False)
        if kind == "channels_last":
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, picture: Tensor, tokens: Tensor) -> Tensor:
        assert isinstance(self.scale, Tensor)
        seen = self.conv(picture).mean((2, 3)) * (self.scale if self.kind == "buffers" else 1.0)
        hidden = self.embedding(tokens) + torch.tanh(seen.sum(1, keepdim=True))
        hidden = self.twice(torch.tanh(self.twice(torch.tanh(self.inner(hidden)))))
        scores: Tensor = self.head(hidden * self.factor)
        return scores


@dataclass(frozen=True)
class Case:
    """One cell of the grid. `samples` are the shares of the batch, a zero among them means a rank without any."""

    ranks: int
    samples: str = "equal"
    accumulation: int = 1
    kind: str = "plain"
    optimizer: str = "sgd"
    dtype: torch.dtype = torch.float64

    def parts(self) -> list[slice]:
        shares = {"equal": [1, 1, 1], "unequal": [7, 4, 1], "zero": [5, 0, 2]}[self.samples][: self.ranks]
        cut = cut_by(apportion(SAMPLES, shares))
        return [slice(start, stop) for start, stop in itertools.pairwise(cut)]


def batches(case: Case) -> list[list[tuple[Tensor, Tensor, Tensor]]]:
    """By step and micro-batch: pictures, tokens, and what comes next."""
    own = torch.Generator().manual_seed(9)

    def batch() -> tuple[Tensor, Tensor, Tensor]:
        picture = torch.randn(SAMPLES, 2, 4, 4, generator=own, dtype=torch.float64).to(case.dtype)
        tokens = torch.randint(0, 7, (2, SAMPLES), generator=own)
        return picture, tokens[0], tokens[1]

    return [[batch() for _ in range(case.accumulation)] for _ in range(STEPS)]


def loss_of(module: nn.Module, batch: Sequence[Tensor], part: slice, count: int) -> Tensor:
    picture, tokens, nexts = (one[part] for one in batch)
    return F.cross_entropy(module(picture, tokens), nexts, reduction="sum") / count


@dataclass
class Outcome:
    state: FullState
    norms: list[float]
    replica: list[Tensor]


def train_dense(case: Case) -> Outcome:
    model = Net(case.kind, 0, case.dtype)
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    norms = []
    for micros in batches(case):
        for micro in micros:
            loss_of(model, micro, slice(None), SAMPLES * case.accumulation).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return Outcome(FullState(dict(model.state_dict()), optimizer.state_dict()), norms, [])


def train_on(case: Case, wrap: Wrap, group: Group, *, drops_grads: bool = True, device: str = "cpu") -> Outcome:
    strategy = wrap(Net(case.kind, group.rank, case.dtype).to(device), OPTIMIZERS[case.optimizer], group)
    part = case.parts()[group.rank]
    norms = []
    for micros in batches(case):
        for place, micro in enumerate(micros):
            is_last = place == len(micros) - 1
            with nullcontext() if is_last else strategy.no_sync():
                if part.stop == part.start:
                    strategy.backward_without_samples()
                else:
                    here = [one.to(device) for one in micro]
                    loss_of(strategy.module, here, part, SAMPLES * case.accumulation).backward()
        norms.append(float(strategy.clip(CLIP)))
        strategy.optimizer.step()
        strategy.optimizer.zero_grad(set_to_none=drops_grads)
    state = strategy.full_state()
    strategy.close()
    return Outcome(state, norms, [param.detach().clone() for param in strategy.module.parameters()])


def check(case: Case, wrap: Wrap, *, drops_grads: bool = True, is_replicated: bool = True) -> None:
    """Every rank's outcome against the dense run's."""
    dense = train_dense(case)
    found = on_threads(case.ranks, lambda group: train_on(case, wrap, group, drops_grads=drops_grads))
    for one in found:
        torch.testing.assert_close(one.norms, dense.norms, rtol=1e-10, atol=1e-12)
        assert_same_state(one.state, dense.state)
        if is_replicated:
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(one.replica, found[0].replica, strict=True))


def assert_same_state(found: FullState, dense: FullState, atol: float = 1e-12) -> None:
    assert found.model.keys() == dense.model.keys()
    for name, value in dense.model.items():
        torch.testing.assert_close(found.model[name], value, rtol=1e-10, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
    assert found.optimizer["param_groups"] == dense.optimizer["param_groups"]
    assert found.optimizer["state"].keys() == dense.optimizer["state"].keys()
    for place, state in dense.optimizer["state"].items():
        assert found.optimizer["state"][place].keys() == state.keys()
        for key, value in state.items():
            torch.testing.assert_close(found.optimizer["state"][place][key], value, rtol=1e-10, atol=atol)


def all_pairs(**factors: Sequence[Any]) -> list[dict[str, Any]]:
    """Few combinations that have every two values of different factors together at least once; always the same ones."""
    names = list(factors)
    pairs = (((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b])
    bits = {pair: 1 << place for place, pair in enumerate(pairs)}  # sets of pairs as numbers: ten times as quick
    every = [dict(zip(names, values, strict=True)) for values in itertools.product(*factors.values())]
    has = [sum(bits[pair] for pair in itertools.combinations(one.items(), 2)) for one in every]
    left, chosen = sum(bits.values()), []
    while left:
        best = max(range(len(every)), key=lambda place: (left & has[place]).bit_count())
        left &= ~has[best]
        chosen.append(every[best])
    return chosen


SHARES = (5.0, 0.0, 2.0)


def sharded(make: MakeOptimizer, group: Group, shares: tuple[float, ...] | None, by_tensors: bool) -> MakeOptimizer:
    own = None if shares is None else shares[: group.world_size]
    return lambda params: ShardedOptimizer(make(params), group, shares=own, by_tensors=by_tensors)


WRAPS: dict[str, Any] = {
    "flat": DDPFlat,
    "bucketed": DDPBucketed,
    "bucketed, small": lambda model, make, group: DDPBucketed(model, make, group, bucket_mb=1e-4),
    "bucketed, by param": lambda model, make, group: DDPBucketed(model, make, group, bucket_mb=0),
}
for name, shares, by_tensors in itertools.product(("flat", "bucketed"), (None, SHARES), (False, True)):
    WRAPS[f"{name}, sharded by {'tensors' if by_tensors else 'elements'}{', uneven' if shares else ''}"] = (
        lambda model, make, group, kind=WRAPS[name], shares=shares, by_tensors=by_tensors: kind(
            model, sharded(make, group, shares, by_tensors), group
        )
    )
for shares, by_tensors in itertools.product((None, SHARES), (False, True)):
    WRAPS[f"zero2 by {'tensors' if by_tensors else 'elements'}{', uneven' if shares else ''}"] = (
        lambda model, make, group, shares=shares, by_tensors=by_tensors: Zero2(
            model,
            make,
            group,
            shares=shares and shares[: group.world_size],
            by_tensors=by_tensors,
            bucket_mb=200 / (1 << 20),
        )
    )
for shares in (None, SHARES):
    WRAPS[f"fsdp{', uneven' if shares else ''}"] = lambda model, make, group, shares=shares: FSDP(
        model,
        make,
        group,
        shares=shares and shares[: group.world_size],
        units=[model.conv, model.inner],
        bucket_mb=200 / (1 << 20) if shares else None,
    )
