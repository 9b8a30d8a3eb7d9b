"""The sharded optimizer by itself: who holds how much, schedulers, and states that move between any ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from tests.parallel.parity import Net
from tests.parallel.parts import assert_equal, step, trained
from tests.ranks import ThreadGroup, on_threads
from uneven.comm.group import Group, SoloGroup
from uneven.parallel.flat_shards import assign_tensors
from uneven.parallel.sharded_optimizer import ShardedOptimizer

MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: AdamW(params, lr=1e-2),
    "amsgrad": lambda params: AdamW(params, lr=1e-2, amsgrad=True),
    "adagrad": lambda params: Adagrad(params, lr=1e-2, initial_accumulator_value=0.1),
}
both_cuts = pytest.mark.parametrize("by_tensors", [False, True])


@both_cuts
@pytest.mark.parametrize("shares", [None, (5, 2, 1), (1, 0, 3), (0, 0, 1)])
@pytest.mark.parametrize("name", MAKERS)
def test_params_and_states_are_those_of_the_plain_optimizer(
    name: str, shares: tuple[float, ...] | None, by_tensors: bool
) -> None:
    plain_model, plain = trained(MAKERS[name])

    def rank(group: ThreadGroup) -> tuple[dict[str, Tensor], dict[str, Any]]:
        model, optimizer = trained(
            lambda params: ShardedOptimizer(MAKERS[name](params), group, shares=shares, by_tensors=by_tensors)
        )
        return dict(model.state_dict()), optimizer.state_dict()

    for params, state in on_threads(3, rank):
        assert_equal(params, dict(plain_model.state_dict()))
        assert state["param_groups"] == plain.state_dict()["param_groups"]
        assert_equal(state["state"], plain.state_dict()["state"])


@both_cuts
def test_a_state_moves_to_other_ranks_other_shares_and_back_to_plain(by_tensors: bool) -> None:
    plain_model, plain = trained(MAKERS["adamw"], 2)
    step(plain_model, plain, 2)

    def first(group: ThreadGroup) -> tuple[dict[str, Tensor], dict[str, Any]]:
        model, optimizer = trained(
            lambda params: ShardedOptimizer(MAKERS["adamw"](params), group, shares=(5, 2, 1), by_tensors=not by_tensors)
        )
        return dict(model.state_dict()), optimizer.state_dict()

    params, state = on_threads(3, first)[1]

    def second(group: Group) -> dict[str, Tensor]:
        model = Net("plain", 7)
        optimizer = ShardedOptimizer(MAKERS["adamw"](model.parameters()), group, shares=None, by_tensors=by_tensors)
        model.load_state_dict(params)
        optimizer.load_state_dict(state)
        step(model, optimizer, 2)
        return dict(model.state_dict())

    for found in (*on_threads(2, second), second(SoloGroup())):
        assert_equal(found, dict(plain_model.state_dict()))
    model = Net("plain", 7)
    optimizer = MAKERS["adamw"](model.parameters())
    model.load_state_dict(params)
    optimizer.load_state_dict(state)
    step(model, optimizer, 2)
    assert_equal(dict(model.state_dict()), dict(plain_model.state_dict()))


def test_bytes_go_by_shares() -> None:
    def rank(group: ThreadGroup) -> int:
        model = nn.Linear(100, 21)
        optimizer = ShardedOptimizer(AdamW(model.parameters()), group, shares=(15, 6))
        model(torch.ones(1, 100)).sum().backward()
        optimizer.step()
        assert optimizer._inner is not None
        tensors = [value for state in optimizer._inner.state.values() for value in state.values()]
        return sum(value.numel() for value in tensors if value.dim())

    assert on_threads(2, rank) == [2 * 2121 * 15 // 21, 2 * 2121 * 6 // 21]


def test_whole_tensors_go_to_whoever_has_the_least_for_its_share() -> None:
    assert assign_tensors([10, 30, 20], (1, 1)) == [1, 0, 1]
    assert assign_tensors([10, 10, 10], (2, 1)) == [0, 0, 1]
    assert assign_tensors([10, 10], (0, 1)) == [1, 1]


def test_a_scheduler_moves_the_rate_of_the_pieces() -> None:
    def train(wrap: Callable[[Optimizer], Optimizer]) -> Tensor:
        model = Net("plain", 0)
        optimizer = wrap(SGD(model.parameters(), lr=0.1))
        scheduler = StepLR(optimizer, 1, 0.5)
        for number in range(3):
            step(model, optimizer, number)
            scheduler.step()
        return model.head.weight.detach()

    expected = train(lambda plain: plain)
    for found in on_threads(2, lambda group: train(lambda plain: ShardedOptimizer(plain, group))):
        assert_equal(found, expected)


def test_a_closure_is_called_and_its_loss_comes_back() -> None:
    model = nn.Linear(2, 1)
    optimizer = ShardedOptimizer(SGD(model.parameters(), lr=0.1), SoloGroup())

    def closure() -> Tensor:
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    before = model.weight.detach().clone()
    assert isinstance(optimizer.step(closure), Tensor)
    assert not torch.equal(model.weight, before)


def test_wrong_shares_are_told() -> None:
    make = lambda: SGD(nn.Linear(2, 1).parameters(), lr=0.1)  # noqa: E731
    for shares in ((1.0, 1.0), (0.0,), (-1.0,)):
        with pytest.raises(ValueError, match="shares"):
            ShardedOptimizer(make(), SoloGroup(), shares=shares)
