"""Every strategy trains what one process trains: all pairs of what may differ here, the whole grid by `-m grid`."""

import copy
import gc
import itertools
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.parity import (
    KINDS,
    OPTIMIZERS,
    WRAPS,
    Case,
    Net,
    all_pairs,
    batches,
    check,
    loss_of,
    train_dense,
    train_on,
)
from tests.ranks import ThreadGroup, on_threads
from uneven.comm.group import SoloGroup
from uneven.errors import InputError
from uneven.parallel.ddp import DDPBucketed, DDPFlat, Zero2
from uneven.parallel.fsdp import FSDP
from uneven.parallel.strategy import Strategy

FACTORS: dict[str, Any] = {
    "wrap": list(WRAPS),
    "samples": ("equal", "unequal", "zero"),
    "accumulation": (1, 3),
    "kind": KINDS,
    "ranks": (1, 2, 3),
    "optimizer": tuple(OPTIMIZERS),
}
PAIRS = all_pairs(**FACTORS)


def named(cell: dict[str, Any]) -> str:
    return "-".join(str(value) for value in cell.values())


def run(cell: dict[str, Any]) -> None:
    rest = dict(cell)
    check(wrap=WRAPS[rest.pop("wrap")], case=Case(**rest))


@pytest.mark.parametrize("cell", PAIRS, ids=named)
def test_what_one_process_trains(cell: dict[str, Any]) -> None:
    run(cell)


@pytest.mark.grid
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrap", WRAPS)
def test_the_whole_grid(wrap: str, kind: str) -> None:
    """Not a test for each cell: pytest collects these in the default suite, too."""
    for values in itertools.product(*(FACTORS | {"wrap": [wrap], "kind": [kind]}).values()):
        cell = dict(zip(FACTORS, values, strict=True))
        try:
            run(cell)
        except Exception as error:
            raise AssertionError(named(cell)) from error


@pytest.mark.parametrize("wrap", WRAPS)
def test_in_single_precision(wrap: str) -> None:
    """SGD to 1e-6 of every tensor. Adam turns rounding into steps where a gradient is zero: the whole way counts."""
    case = Case(3, "unequal", 2, "buffers", "sgd", torch.float32)
    expected = train_dense(case).state
    for one in on_threads(3, lambda group: train_on(case, WRAPS[wrap], group)):
        for name, value in expected.model.items():
            assert (one.state.model[name] - value).norm() <= 1e-6 * value.norm(), name
        for place, state in expected.optimizer["state"].items():
            momentum = state["momentum_buffer"]
            assert (one.state.optimizer["state"][place]["momentum_buffer"] - momentum).norm() <= 1e-6 * momentum.norm()
    case = replace(case, optimizer="adamw")
    expected, begin = train_dense(case).state, dict(Net("buffers", 0, torch.float32).state_dict())
    moved = sum(float((value - begin[name]).square().sum()) for name, value in expected.model.items())
    for one in on_threads(3, lambda group: train_on(case, WRAPS[wrap], group)):
        apart = sum(float((one.state.model[name] - value).square().sum()) for name, value in expected.model.items())
        assert apart**0.5 <= 1e-4 * moved**0.5


@pytest.mark.parametrize("wrap", ["flat", "bucketed, small", "bucketed, sharded by elements, uneven"])
def test_gradients_zeroed_in_place_are_the_same(wrap: str) -> None:
    check(Case(2, "unequal", 2, "unused", "adamw"), WRAPS[wrap], drops_grads=False)


def dense_and_ours(micros: int) -> tuple[nn.Module, list[nn.Module]]:
    """Gradients after several backward passes, each of them summed over two ranks."""
    case = Case(2, "unequal", micros)
    whole = Net("plain", 0)
    for micro in batches(case)[0]:
        loss_of(whole, micro, slice(None), 12).backward()

    def rank(group: ThreadGroup) -> nn.Module:
        strategy = DDPBucketed(Net("plain", group.rank), OPTIMIZERS["sgd"], group, bucket_mb=1e-4)
        for micro in batches(case)[0]:
            loss_of(strategy.module, micro, case.parts()[group.rank], 12).backward()
        strategy.close()
        return strategy.module

    return whole, on_threads(2, rank)


@pytest.mark.parametrize("micros", [1, 2, 3])
def test_what_was_summed_before_counts_once(micros: int) -> None:
    whole, ours = dense_and_ours(micros)
    for one in ours:
        for mine, theirs in zip(one.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("wrap", "sums"), [("flat", 1), ("bucketed", 1), ("bucketed, by param", 9)])
def test_a_step_has_as_many_sums_as_buckets(wrap: str, sums: int) -> None:
    def rank(group: ThreadGroup) -> tuple[int, int, int]:
        strategy: Strategy = WRAPS[wrap](Net("plain", 0), OPTIMIZERS["sgd"], group)
        micro = batches(Case(2))[0][0]
        before = group.traffic.collectives, group.traffic.payload_bytes
        with strategy.no_sync():
            loss_of(strategy.module, micro, slice(0, 5), 12).backward()
        silent = group.traffic.collectives - before[0]
        loss_of(strategy.module, micro, slice(5, 12), 12).backward()
        sent = group.traffic.payload_bytes - before[1]
        return silent, group.traffic.collectives - before[0], sent

    params = [p.numel() for p in Net("plain", 0).parameters()]
    assert on_threads(2, rank) == [(0, sums, (sum(params) + len(params)) * 8)] * 2, "and a flag for each param"


def test_a_full_bucket_leaves_while_backward_computes() -> None:
    def rank(group: ThreadGroup) -> list[int]:
        model = Net("plain", 0)
        strategy = DDPBucketed(model, OPTIMIZERS["sgd"], group, bucket_mb=0)
        seen = []
        model.conv.weight.register_hook(lambda _: seen.append(group.traffic.collectives - before))
        for _ in range(2):
            before = group.traffic.collectives
            loss_of(strategy.module, batches(Case(2))[0][0], slice(None), 12).backward()
        return seen

    for first, sent in on_threads(2, rank):
        assert first == 0, "the first backward shows whether a param gets more than one gradient"
        assert sent >= 4, "what lies behind the first layer was on its way when backward came to it"


def test_ranks_with_different_models_are_told_apart() -> None:
    def rank(group: ThreadGroup) -> None:
        model = nn.Linear(2, 2 + group.rank)
        DDPFlat(model, OPTIMIZERS["sgd"], group)

    with pytest.raises(InputError, match=r"rank 1 built another model.*weight \(3, 2\)"):
        on_threads(2, rank)


def test_what_cannot_be_summed_is_told() -> None:
    model = nn.Sequential(nn.Embedding(3, 2, sparse=True), nn.Linear(2, 1))
    strategy = DDPBucketed(model, OPTIMIZERS["sgd"], SoloGroup())
    with pytest.raises(RuntimeError, match="make the embedding dense"):
        strategy.module(torch.tensor([1])).sum().backward()
    strategy = DDPBucketed(nn.Linear(2, 1), OPTIMIZERS["sgd"], SoloGroup())
    with pytest.raises(RuntimeError, match="second-order gradients"):
        strategy.module(torch.ones(1, 2)).sum().backward(create_graph=True)


def test_gradients_inside_the_loss_are_no_sum_of_ranks() -> None:
    plain = nn.Linear(2, 1)
    strategy = DDPBucketed(copy.deepcopy(plain), OPTIMIZERS["sgd"], SoloGroup())
    for model in (plain, strategy.module):
        x = torch.ones(1, 2, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
    torch.testing.assert_close(strategy.module.weight.grad, plain.weight.grad)


@pytest.mark.parametrize("wrap", ["zero2 by elements, uneven", "zero2 by tensors", "fsdp, uneven"])
def test_only_the_owners_get_the_sums_over_nccl(wrap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collectives that NCCL uses: on threads, a shard is NaN on every rank that does not own it."""
    monkeypatch.setattr(ThreadGroup, "pretends_nccl", True)
    check(Case(3, "zero", 2, "unused", "adamw"), WRAPS[wrap])


@pytest.mark.parametrize("wrap", [DDPFlat, Zero2, FSDP])
def test_a_model_without_anything_to_train_is_told(wrap: Any) -> None:
    with pytest.raises(ValueError, match="no param that requires a gradient"):
        wrap(nn.Linear(2, 1).requires_grad_(False), OPTIMIZERS["sgd"], SoloGroup())


@pytest.mark.parametrize("wrap", WRAPS)
def test_nothing_is_left_of_a_strategy(wrap: str) -> None:
    strategy: Strategy = WRAPS[wrap](Net("plain", 0), OPTIMIZERS["adamw"], SoloGroup())
    loss_of(strategy.module, batches(Case(1))[0][0], slice(None), 12).backward()
    strategy.optimizer.step()
    watched = [weakref.ref(one) for one in (strategy, strategy.module, *strategy.module.parameters())]
    del strategy
    gc.collect()
    assert [one() for one in watched] == [None] * len(watched)


def test_a_strategy_that_is_gone_is_missed_and_a_closed_one_is_not() -> None:
    model = nn.Linear(2, 1)
    strategy = DDPFlat(model, OPTIMIZERS["sgd"], SoloGroup())
    del strategy
    with pytest.raises(RuntimeError, match="strategy of this model is gone"):
        model(torch.ones(1, 2)).sum().backward()
    model = nn.Linear(2, 1)
    DDPFlat(model, OPTIMIZERS["sgd"], SoloGroup()).close()
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None


class Fragile(torch.autograd.Function):
    """Backward fails while the flag is up."""

    fails = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        del ctx
        if Fragile.fails:
            raise MemoryError("no room")
        return grads[0]


@pytest.mark.parametrize("wrap", [DDPFlat, DDPBucketed, Zero2, FSDP])
def test_after_a_backward_that_failed_the_next_one_is_whole(wrap: Any) -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.last(Fragile.apply(self.first(x)))
            return scores

    plain = Chain()
    strategy = wrap(copy.deepcopy(plain), OPTIMIZERS["sgd"], SoloGroup())
    x = torch.ones(3, 2)
    Fragile.fails = True
    try:
        with pytest.raises(MemoryError):
            strategy.module(x).sum().backward()
    finally:
        Fragile.fails = False
    strategy.optimizer.zero_grad()
    optimizer = OPTIMIZERS["sgd"](plain.parameters())
    for model, made in ((plain, optimizer), (strategy.module, strategy.optimizer)):
        model(x).sum().backward()
        made.step()
    torch.testing.assert_close(strategy.full_state().model, dict(plain.state_dict()))


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("wrap", [DDPBucketed, Zero2])
def test_gradients_of_params_inside_the_loss_are_no_backward(wrap: Any, create_graph: bool) -> None:
    """torch.autograd.grad comes to the params, too; a rank without samples takes part in one sum, not in two."""

    def penalised(model: nn.Module, rows: Tensor) -> Tensor:
        loss = model(rows).square().sum() / 4
        grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, create_graph=create_graph)
        return loss + torch.stack([grad.square().sum() for grad in grads]).sum()

    def make() -> nn.Module:
        model = nn.Linear(3, 2).double()
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(torch.arange(param.numel()).view_as(param) / 5)
        return model

    rows = torch.arange(12.0, dtype=torch.float64).view(4, 3) / 7

    def rank(group: ThreadGroup) -> dict[str, Tensor | None]:
        strategy = wrap(make(), OPTIMIZERS["sgd"], group)
        if group.rank:
            strategy.backward_without_samples()
        else:
            penalised(strategy.module, rows).backward()
        found: dict[str, Tensor | None] = strategy.full_gradients()
        strategy.close()
        return found

    plain = make()
    penalised(plain, rows).backward()
    for found in on_threads(2, rank):
        torch.testing.assert_close(found, {name: param.grad for name, param in plain.named_parameters()})


@pytest.mark.parametrize("wrap", [DDPFlat, Zero2, FSDP])
def test_both_parts_of_a_complex_gradient_count_in_the_norm(wrap: Any) -> None:
    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.factor).abs().square().sum()

    def rank(group: ThreadGroup) -> tuple[float, Tensor]:
        strategy = wrap(Turning(), OPTIMIZERS["sgd"], group)
        (strategy.module(torch.ones(2)) / group.world_size).backward()
        norm = float(strategy.clip(0.5))
        return norm, strategy.full_gradients()["factor"]

    plain = Turning()
    plain(torch.ones(2)).backward()
    norm = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
    for found in on_threads(2, rank):
        torch.testing.assert_close(found, (norm, plain.factor.grad))


@pytest.mark.parametrize("wrap", [DDPFlat, Zero2])
def test_a_hook_that_removes_a_gradient_before_its_sum_is_told(wrap: Any) -> None:
    """As in loops that step an optimizer for each param while backward runs."""
    model = nn.Linear(2, 1)
    model.weight.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    strategy = wrap(model, OPTIMIZERS["sgd"], SoloGroup())
    with pytest.raises(InputError, match=r"a hook has removed the gradient of a param of shape \(1, 2\)"):
        strategy.module(torch.ones(1, 2)).sum().backward()
