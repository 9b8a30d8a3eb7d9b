"""Checkpoints with use_reentrant=True run a backward inside backward: sums are those of one process, or refused."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.ranks import ThreadGroup, on_threads
from uneven.comm.group import Group
from uneven.errors import InputError
from uneven.parallel.ddp import DDPBucketed, DDPFlat, Zero1, Zero2
from uneven.parallel.fsdp import FSDP
from uneven.parallel.reducer import Reducer

WIDTH, ROWS, STEPS = 5, 6, 3
DTYPE = torch.float64


def again(segment: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Computed a second time in backward, by a backward of its own."""
    out: Tensor = checkpoint(segment, x, use_reentrant=True)
    return out


class Chain(nn.Module):
    """`kind` says which layers lie in checkpoints."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.unused = nn.Linear(WIDTH, WIDTH, dtype=DTYPE)  # the first, so the last to leave: it holds up no other
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=DTYPE) for _ in range(4))
        own = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=own) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, last = self.layers
        if self.kind == "whole":
            return again(nn.Sequential(first, nn.Tanh(), second, third, last), x.requires_grad_())
        if self.kind == "inside each other":
            hidden = again(lambda y: torch.tanh(third(again(lambda z: torch.tanh(second(z)), y))), first(x))
            return torch.tanh(last(hidden))
        hidden = again(lambda y: torch.tanh(second(y)), first(x))
        if self.kind == "repeated":
            return again(lambda y: torch.tanh(second(y)), again(lambda y: torch.tanh(third(y)), last(hidden)))
        hidden = again(lambda y: torch.tanh(third(y)), hidden)
        return torch.tanh(last(hidden)) if self.kind == "each once" else hidden  # "no layer behind": without the last


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-2)


def rows_of(step: int, group: Group | None = None) -> Tensor:
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step), dtype=DTYPE)
    return rows if group is None else rows.chunk(group.world_size)[group.rank]


def dense(kind: str) -> dict[str, Tensor]:
    model = Chain(kind)
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        (model(rows_of(step)).square().sum() / ROWS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


WRAPS: dict[str, Callable[[nn.Module, Group], Any]] = {
    "flat": lambda model, group: DDPFlat(model, sgd, group),
    "bucketed": lambda model, group: DDPBucketed(model, sgd, group, bucket_mb=0),
    "zero1": lambda model, group: Zero1(model, sgd, group, bucket_mb=0, shares=(3, 1)),
    "zero2": lambda model, group: Zero2(model, sgd, group, bucket_mb=0, shares=(3, 1)),
}
ONCE = ("each once", "no layer behind", "inside each other", "whole")


def train(kind: str, wrap: str, group: Group) -> dict[str, Tensor]:
    strategy = WRAPS[wrap](Chain(kind), group)
    for step in range(STEPS):
        (strategy.module(rows_of(step, group)).square().sum() / ROWS).backward()
        strategy.optimizer.step()
        strategy.optimizer.zero_grad()
    found: dict[str, Tensor] = strategy.full_params()
    strategy.close()
    return found


@pytest.mark.parametrize("kind", [*ONCE, "repeated"])
@pytest.mark.parametrize("wrap", WRAPS)
def test_what_one_process_trains(kind: str, wrap: str) -> None:
    if (wrap, kind) == ("zero2", "repeated"):
        with pytest.raises(InputError, match="use_reentrant=False"):
            on_threads(2, lambda group: train(kind, wrap, group))
        return
    for found in on_threads(2, lambda group: train(kind, wrap, group)):
        torch.testing.assert_close(found, dense(kind), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [*ONCE, "repeated"])
def test_a_reduction_that_its_caller_ends(kind: str) -> None:
    """As in the steps of `fit`."""

    def rank(group: ThreadGroup) -> dict[str, Tensor]:
        model = Chain(kind)
        reducer = Reducer(model.parameters(), group, 0, num_stats=1)
        optimizer = sgd(model.parameters())
        for step in range(STEPS):
            reducer.prepare()
            (model(rows_of(step, group)).square().sum() / ROWS).backward()
            reducer.finalize(lambda: [0.0])
            optimizer.step()
        reducer.close()
        return {name: param.detach() for name, param in model.named_parameters()}

    for found in on_threads(2, rank):
        torch.testing.assert_close(found, dense(kind), rtol=1e-10, atol=1e-12)


def test_a_param_that_repeats_after_its_bucket_has_left_is_refused() -> None:
    """The first backward has shown no repeated param, so buckets leave early."""

    def rank(group: ThreadGroup) -> None:
        model = Chain("each once")
        strategy = DDPBucketed(model, sgd, group, bucket_mb=0)
        for kind in ("each once", "repeated"):
            model.kind = kind
            model(rows_of(0, group)).sum().backward()
        strategy.close()

    with pytest.raises(InputError, match=r"gradient twice.*use_reentrant=False"):
        on_threads(2, rank)


def test_after_a_backward_that_failed_inside_the_next_one_is_whole() -> None:
    class Failing(nn.Module):
        fails = True

        def forward(self, x: Tensor) -> Tensor:
            if self.fails and torch.is_grad_enabled():
                raise MemoryError("no room to compute it again")
            return x

    def rank(group: ThreadGroup) -> dict[str, Tensor | None]:
        model = Chain("each once")
        strategy = Zero2(model, sgd, group, bucket_mb=0)
        failing = Failing()
        model.layers[1] = nn.Sequential(failing, copy.deepcopy(model.layers[1]).requires_grad_(False))
        with pytest.raises(MemoryError):
            model(rows_of(0, group)).sum().backward()
        failing.fails = False
        strategy.optimizer.zero_grad()
        model(rows_of(0, group)).sum().backward()
        return {str(place): gradient for place, gradient in enumerate(strategy.full_gradients().values())}

    plain = Chain("each once")
    plain.layers[1].requires_grad_(False)
    plain(rows_of(0)).sum().backward()
    expected = [param.grad for param in plain.parameters() if param.grad is not None]
    for found in on_threads(2, rank):
        torch.testing.assert_close([grad for grad in found.values() if grad is not None], expected)


class Inner(nn.Module):
    """A block that checkpoints a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, dtype=DTYPE) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return again(lambda y: torch.tanh(self.up(y)), self.down(x))


class Tower(nn.Module):
    """`outside`: the blocks that lie in a checkpoint."""

    def __init__(self, outside: Sequence[int] = ()) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(5)
        self.first = nn.Linear(WIDTH, WIDTH, dtype=DTYPE)
        self.blocks = nn.ModuleList(Inner() for _ in range(3))
        self.outside = outside
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=own) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for place, block in enumerate(self.blocks):
            x = again(nn.Sequential(block, nn.Tanh()), x) if place in self.outside else block(x)
        return x


def test_fsdp_takes_it_inside_a_block_and_refuses_it_around_one() -> None:
    def rank(group: ThreadGroup, outside: Sequence[int] = ()) -> dict[str, Tensor | None]:
        strategy = FSDP(Tower(outside), sgd, group)
        (strategy.module(rows_of(0, group)).square().sum()).backward()
        found = strategy.full_gradients()
        strategy.close()
        return found

    plain = Tower()
    plain(rows_of(0)).square().sum().backward()
    for found in on_threads(2, rank):
        for name, param in plain.named_parameters():
            torch.testing.assert_close(found[name], param.grad, rtol=1e-10, atol=1e-12)
    for outside, named in [((0, 1, 2), 2), ((1,), 1)]:  # the params of the second may be on their way already
        with pytest.raises(InputError, match=rf"recomputes blocks.{named}.*use_reentrant=False"):
            on_threads(2, lambda group, outside=outside: rank(group, outside))
