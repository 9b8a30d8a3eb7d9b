"""A state saved under any strategy, ranks and shares goes into any other, and into plain PyTorch, bit by bit."""

import copy
import itertools

import pytest
import torch

from tests.parallel.parity import OPTIMIZERS, WRAPS, Case, Net, batches, loss_of
from tests.ranks import ThreadGroup, on_threads
from uneven.comm.group import Group, SoloGroup
from uneven.parallel.strategy import FullState, Strategy

NAMES = [
    "flat",
    "bucketed, sharded by elements, uneven",
    "flat, sharded by tensors",
    "zero2 by elements",
    "fsdp, uneven",
]


def step(strategy: Strategy, group: Group, number: int) -> None:
    """The whole batch on rank 0; the others sit out, so that sums add nothing that rounds."""
    if group.rank == 0:
        loss_of(strategy.module, batches(Case(1))[number][0], slice(None), 12).backward()
    else:
        strategy.backward_without_samples()
    strategy.optimizer.step()
    strategy.optimizer.zero_grad()


def wrapped(name: str, group: Group, seed: int) -> Strategy:
    strategy: Strategy = WRAPS[name](Net("buffers", seed), OPTIMIZERS["adamw"], group)
    return strategy


def saved(name: str, ranks: int) -> FullState:
    def rank(group: ThreadGroup) -> FullState:
        strategy = wrapped(name, group, 0)
        step(strategy, group, 0)
        step(strategy, group, 1)
        return strategy.full_state()

    return on_threads(ranks, rank)[-1]


def assert_equal(first: FullState, second: FullState) -> None:
    torch.testing.assert_close(first.model, second.model, rtol=0, atol=0)
    torch.testing.assert_close(first.optimizer["state"], second.optimizer["state"], rtol=0, atol=0)
    assert first.optimizer["param_groups"] == second.optimizer["param_groups"]


@pytest.mark.parametrize(("before", "after"), [*itertools.product(NAMES, NAMES)])
def test_from_three_ranks_to_two_and_the_same_step(before: str, after: str) -> None:
    state = saved(before, 3)

    def rank(group: ThreadGroup) -> tuple[FullState, FullState]:
        strategy = wrapped(after, group, 7)
        strategy.load_full_state(state)
        loaded = strategy.full_state()
        step(strategy, group, 2)
        return loaded, strategy.full_state()

    plain = Net("buffers", 7)
    optimizer = OPTIMIZERS["adamw"](plain.parameters())
    plain.load_state_dict(state.model)
    optimizer.load_state_dict(copy.deepcopy(state.optimizer))
    loss_of(plain, batches(Case(1))[2][0], slice(None), 12).backward()
    optimizer.step()
    dense = FullState(dict(plain.state_dict()), optimizer.state_dict())
    for loaded, stepped in on_threads(2, rank):
        assert_equal(loaded, state)
        assert_equal(stepped, dense)


@pytest.mark.parametrize("name", NAMES)
def test_from_two_ranks_to_one(name: str) -> None:
    state = saved(name, 2)
    strategy = wrapped(name, SoloGroup(), 7)
    strategy.load_full_state(state)
    assert_equal(strategy.full_state(), state)
