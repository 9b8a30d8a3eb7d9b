"""Groups of params under a sharded optimizer: who holds what, groups added later, and params that nobody sums."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from tests.parallel.tower import assert_equal, inputs, run, tower
from tests.ranks import ThreadGroup, on_threads
from uneven.comm.group import SoloGroup
from uneven.errors import InputError
from uneven.parallel import FSDP, DDPBucketed, ShardedOptimizer, Zero1, Zero2


@pytest.mark.parametrize("by_tensors", [False, True])
def test_every_rank_holds_its_part(by_tensors: bool) -> None:
    sizes = [9, 7, 5, 3]

    def held(optimizer: ShardedOptimizer) -> int:
        return sum(param.numel() for settings in optimizer.inner.param_groups for param in settings["params"])

    def rank(group: ThreadGroup) -> tuple[int, int]:
        params = [nn.Parameter(torch.rand(size, 1)) for size in sizes * 3]
        optimizer = ShardedOptimizer(SGD(params[:-1], lr=0.1), group, by_tensors=by_tensors)
        before = held(optimizer)
        optimizer.add_param_group({"params": [nn.Parameter(torch.rand(3, 1)), torch.rand(100, 1)], "lr": 0.3})
        assert [len(one.param_groups) for one in (optimizer, optimizer.inner)] == [2, 2]
        return before, held(optimizer)

    before, after = zip(*on_threads(3, rank), strict=True)
    assert (sum(before), sum(after)) == (69, 72), "what is not trained has no owner"
    assert after == (24, 24, 24), "a whole tensor goes to the rank that has the least"


@pytest.mark.parametrize("kind", [AdamW, torch.optim.Adafactor])
def test_groups_at_once_and_groups_added_later_train_the_same(kind: Any) -> None:
    def parts(model: nn.Sequential) -> list[list[nn.Parameter]]:
        return [[p for p in model.parameters() if (p.dim() == 2) == is_weight] for is_weight in (True, False)]

    def at_once(model: nn.Sequential) -> Optimizer:
        weights, biases = parts(model)
        made: Optimizer = kind(
            [{"params": weights, "weight_decay": 0.0}, {"params": biases, "weight_decay": 0.1}], lr=0.01
        )
        return made

    def later(model: nn.Sequential, group: Any) -> Optimizer:
        weights, biases = parts(model)
        optimizer = ShardedOptimizer(kind(weights, lr=0.01, weight_decay=0.0), group, shares=(3, 0, 1))
        optimizer.add_param_group({"params": biases, "weight_decay": 0.1})
        return optimizer

    plain_model = tower()
    plain = at_once(plain_model)
    expected = run(plain_model, plain)

    def rank(group: ThreadGroup) -> list[tuple[dict[str, Tensor], Any]]:
        found = []
        for make in (lambda model: ShardedOptimizer(at_once(model), group), lambda model: later(model, group)):
            model = tower()
            optimizer = make(model)
            found.append((run(model, optimizer), optimizer.state_dict()))
        return found

    for found in on_threads(3, rank):
        for params, state in found:
            assert_equal(params, expected)
            assert_equal(state["state"], plain.state_dict()["state"])
            assert state["param_groups"] == plain.state_dict()["param_groups"]


def test_later_groups_under_zero2_and_fsdp_and_what_cannot_be_added() -> None:
    def late(model: nn.Sequential) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        return list(model[0].parameters()), [*model[2].parameters(), *model[3].parameters()]

    plain = tower()
    optimizer = Adam(late(plain)[0], lr=0.01)
    optimizer.add_param_group({"params": late(plain)[1], "lr": 0.02})
    expected = run(plain, optimizer)

    def rank(group: ThreadGroup) -> list[dict[str, Tensor]]:
        found = []
        for wrap in (Zero2, FSDP):
            model = tower()
            first, second = late(model)
            strategy = wrap(model, Adam(first, lr=0.01), group)
            strategy.optimizer.add_param_group({"params": second, "lr": 0.02})
            for number in range(3):
                strategy.optimizer.zero_grad()
                (model(inputs(number)).square().sum() / group.world_size).backward()
                strategy.optimizer.step()
            found.append(strategy.full_params())
            if wrap is FSDP:
                with pytest.raises(InputError, match="was not trained when the strategy sharded the model"):
                    strategy.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
                assert len(strategy.optimizer.param_groups) == 2
            strategy.close()
        return found

    for found in on_threads(2, rank):
        for params in found:
            torch.testing.assert_close(params, expected, rtol=1e-10, atol=1e-12)


def test_params_whose_gradients_nobody_sums_are_refused() -> None:
    stranger = nn.Parameter(torch.ones(2))
    for wrap in (DDPBucketed, Zero1):
        strategy = wrap(tower(), SGD, SoloGroup())
        strategy.optimizer.add_param_group({"params": [stranger]})
        with pytest.raises(InputError, match="its gradients are not summed"):
            strategy.optimizer.step()
    model = tower()
    model[0].requires_grad_(False)
    for wrap in (DDPBucketed, Zero1):
        strategy = wrap(copy.deepcopy(model), SGD, SoloGroup())
        strategy.module(inputs(0)).sum().backward()
        strategy.optimizer.step()  # what is frozen is in the optimizer, and stays as it is
        strategy.module[0].requires_grad_(True)
        strategy.module(inputs(0)).sum().backward()
        with pytest.raises(InputError, match=r"did not require a gradient .* make strategy and optimizer again"):
            strategy.optimizer.step()
    strategy = Zero2(copy.deepcopy(model), SGD, SoloGroup())
    strategy.module[0].requires_grad_(True)
    strategy.module(inputs(0)).sum().backward()
    with pytest.raises(InputError, match=r"has a gradient, but did not .* make strategy and optimizer again"):
        strategy.optimizer.step()
