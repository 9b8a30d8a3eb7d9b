"""Layers cut among ranks compute what whole ones do: losses, steps, states, with heads and columns unequal."""

import copy
import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parallel.parity import OPTIMIZERS, all_pairs, assert_same_state
from tests.parallel.tensor_nets import CLIP, KINDS, NOISE, PLAN, ROWS, WIDTH, WORDS, Gpt, dense, loss_of, tokens, train
from tests.ranks import ThreadGroup, on_threads
from uneven.comm.group import SoloGroup
from uneven.parallel.strategy import FullState
from uneven.parallel.tensor_layers import sharded_cross_entropy, vocabulary_cross_entropy
from uneven.parallel.tensor_parallel import Columns, Rows, SequenceParallel, TensorParallel, Words
from uneven.policy.apportion import apportion, cut_by

FACTORS: dict[str, Any] = {
    "shares": [(1,), None, (5, 2), (3, 1, 0), (0, 2, 5)],
    "kind": list(KINDS),
    "optimizer": list(OPTIMIZERS),
    "is_tied": [False, True],
}


@pytest.mark.parametrize("cell", all_pairs(**FACTORS), ids=lambda cell: "-".join(map(str, cell.values())))
def test_what_one_process_trains(cell: dict[str, Any]) -> None:
    """All pairs of what may differ; the whole grid by `-m grid`."""
    check(**cell)


@pytest.mark.grid
def test_the_whole_grid() -> None:
    for values in itertools.product(*FACTORS.values()):
        check(**dict(zip(FACTORS, values, strict=True)))


def check(kind: str, optimizer: str, is_tied: bool, shares: Any) -> None:
    ranks = 2 if shares is None else len(shares)
    expected, norms = dense(optimizer, is_tied)
    for found, clipped in on_threads(ranks, lambda group: train(group, kind, optimizer, is_tied, shares)):
        assert_same_state(found, expected, NOISE)
        torch.testing.assert_close(clipped, norms, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("row_shares", [(1, 1, 1), (6, 2, 1), (0, 0, 1)])
def test_rows_go_by_shares_of_their_own(row_shares: Any) -> None:
    expected, norms = dense("sgd", False)

    def rank(group: ThreadGroup) -> tuple[FullState, list[float]]:
        return train(group, "sequence", "sgd", False, (3, 1, 0), row_shares=row_shares)

    for found, clipped in on_threads(3, rank):
        assert_same_state(found, expected, NOISE)
        torch.testing.assert_close(clipped, norms, rtol=1e-10, atol=1e-12)


def test_between_cut_layers_a_rank_has_its_rows() -> None:
    def rank(group: ThreadGroup) -> Any:
        strategy = SequenceParallel(Gpt(), OPTIMIZERS["sgd"], group, plan=PLAN, shares=(1, 1), row_shares=(4, 1))
        seen: list[Any] = []
        strategy.module.blocks[1].norm2.register_forward_hook(lambda _, __, out: seen.append(tuple(out.shape)))
        strategy.module(tokens(0))
        return seen

    assert on_threads(2, rank) == [[(ROWS, 4, WIDTH)], [(ROWS, 1, WIDTH)]]


def test_a_state_goes_on_with_other_shares_and_in_plain_pytorch() -> None:
    expected, _ = dense("adamw", True)
    state = on_threads(3, lambda group: train(group, "tensor", "adamw", True, (3, 1, 0), range(2)))[0][0]
    for found, _ in on_threads(2, lambda group: train(group, "sequence", "adamw", True, (1, 3), range(2, 3), state)):
        assert_same_state(found, expected, NOISE)
    model = Gpt(is_tied=True)
    made = OPTIMIZERS["adamw"](model.parameters())
    model.load_state_dict(state.model)
    made.load_state_dict(copy.deepcopy(state.optimizer))
    loss_of(model(tokens(2)), 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    made.step()
    assert_same_state(FullState(dict(model.state_dict()), made.state_dict()), expected, NOISE)


def test_bytes_and_columns_go_by_shares() -> None:
    def rank(group: ThreadGroup) -> tuple[Any, ...]:
        block = TensorParallel(Gpt(), OPTIMIZERS["sgd"], group, plan=PLAN, shares=(3, 1)).module.blocks[0]
        return tuple(block.qkv.weight.shape), tuple(block.project.weight.shape), tuple(block.expand.weight.shape)

    assert on_threads(2, rank) == [((27, 12), (12, 9), (8, 12)), ((9, 12), (12, 3), (2, 12))]


@pytest.mark.parametrize("shares", [(1, 1), (5, 2), (1, 0), (0, 1, 3)])
def test_cross_entropy_over_words_that_are_cut(shares: tuple[float, ...]) -> None:
    own = torch.Generator().manual_seed(0)
    scores = torch.randn(6, 4, WORDS, generator=own, dtype=torch.float64) * 30
    targets = torch.randint(0, WORDS, (6, 4), generator=own)
    whole = scores.clone().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), targets.flatten(), reduction="none").view(6, 4)
    (expected * torch.arange(4)).sum().backward()
    cut = cut_by(apportion(WORDS, shares))

    def rank(group: ThreadGroup) -> tuple[Tensor, Tensor]:
        mine = scores[..., cut[group.rank] : cut[group.rank + 1]].clone().requires_grad_()
        loss = sharded_cross_entropy(mine, targets, cut, group)
        (loss * torch.arange(4)).sum().backward()
        assert mine.grad is not None
        return loss.detach(), mine.grad

    found = on_threads(len(shares), rank)
    for loss, _ in found:
        torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(torch.cat([grad for _, grad in found], -1), whole.grad)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shares", [(1, 1), (5, 2)])
def test_training_with_a_head_that_stays_sharded(kind: str, shares: tuple[float, ...]) -> None:
    """One train step for all: `vocabulary_cross_entropy` is plain cross-entropy while the head is whole."""

    def train_step(model: nn.Module, step: int) -> Tensor:
        return vocabulary_cross_entropy(model.head, model(tokens(step)), tokens(step + 100)).mean()

    def steps(model: nn.Module, optimizer: Any) -> None:
        for step in range(3):
            train_step(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    whole = Gpt()
    steps(whole, OPTIMIZERS["sgd"](whole.parameters()))
    expected, _ = dense("sgd", False, steps=0)
    assert not torch.equal(expected.model["head.weight"], whole.head.weight), "it was trained"

    def rank(group: ThreadGroup) -> tuple[FullState, int]:
        plan = PLAN | {"head": Columns()}
        strategy = KINDS[kind](Gpt(), OPTIMIZERS["sgd"], group, plan=plan, shares=shares)
        steps(strategy.module, strategy.optimizer)
        return strategy.full_state(), strategy.module(tokens(0)).shape[-1]

    found = on_threads(2, rank)
    assert sum(columns for _, columns in found) == WORDS, "no rank has all scores"
    for state, _ in found:
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(state.model[name], value, rtol=1e-10, atol=NOISE)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"nothing": Rows()}, "names no module"),
        ({"*.norm": Columns()}, "only nn.Linear"),
        ({"head": Words()}, "only a plain nn.Embedding"),
        ({"*.qkv": Columns(unit=5, parts=3)}, "cannot be divided into 3 x units of 5"),
        ({"*.qkv": Columns(unit=3, parts=3, gathers=True)}, "several parts"),
        ({"token": Words(), "head": Rows()}, "in the same way"),
    ],
)
def test_a_wrong_plan_is_told(plan: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TensorParallel(Gpt(is_tied=True), OPTIMIZERS["sgd"], SoloGroup(), plan=plan)


def test_no_rank_can_be_without_samples() -> None:
    strategy = TensorParallel(Gpt(), OPTIMIZERS["sgd"], SoloGroup(), plan=PLAN)
    with pytest.raises(RuntimeError, match="same samples"):
        strategy.backward_without_samples()


def test_what_was_cut_is_not_kept() -> None:
    model = Gpt()
    dense = weakref.ref(model.blocks[0].expand.weight)
    strategy = TensorParallel(model, OPTIMIZERS["sgd"], SoloGroup(), plan=PLAN)
    gc.collect()
    assert dense() is None
    assert strategy.module is model


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def with_hook(layer: nn.Linear) -> nn.Linear:
    layer.register_forward_hook(lambda module, inputs, output: 2 * output)
    return layer


def with_gradient_hook(layer: nn.Linear) -> nn.Linear:
    layer.weight.register_hook(lambda gradient: 2 * gradient)
    return layer


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (Doubled(4, 4), "a Doubled computes in its own way"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "a ParametrizedLinear computes in its own way"),
        (with_hook(nn.Linear(4, 4)), "it has hooks"),
        (with_gradient_hook(nn.Linear(4, 4)), "it has hooks"),
    ],
)
def test_a_layer_that_does_more_than_a_plain_one_is_refused(layer: nn.Module, words: str) -> None:
    """A plain one would take its place, and train something else without a word."""
    model = nn.Sequential(layer, nn.Linear(4, 2))
    with pytest.raises(ValueError, match=rf"^0: {words}.*out of the plan"):
        TensorParallel(model, OPTIMIZERS["sgd"], SoloGroup(), plan={"0": Columns(), "1": Rows()})
