"""What an optimizer keeps in its param groups stays its own; what a scheduler or a user changes is handed down."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from tests.parallel.parity import Net
from tests.parallel.parts import Counting, assert_equal, step
from tests.ranks import ThreadGroup, on_threads
from uneven.comm.group import SoloGroup
from uneven.errors import InputError
from uneven.parallel import ShardedOptimizer


class Elementwise(Counting):
    is_elementwise = True


class Estimating(Optimizer):
    """Estimates its rate over all gradients, as Prodigy does, and keeps it in the group."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "d": 1e-6})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for settings in self.param_groups:
            grads = [param.grad for param in settings["params"] if param.grad is not None]
            settings["d"] += sum(float(grad.abs().sum()) for grad in grads)
            for param in settings["params"]:
                if param.grad is not None:
                    param.sub_(param.grad * settings["d"])


def train(make: Callable[[Any], Optimizer], *, changes: bool) -> tuple[dict[str, Tensor], Optimizer]:
    model = Net("plain", 0)
    optimizer = make([{"params": [p for p in model.parameters() if p.dim() == one], "lr": 0.1 / one} for one in (1, 2)])
    scheduler = LambdaLR(optimizer, lambda position: 0.9**position)
    for number in range(4):
        if changes and number == 2:
            optimizer.param_groups[1]["k"] = 7
            optimizer.param_groups[0]["lr"] = 0.3
        step(model, optimizer, number)
        scheduler.step()
    return dict(model.state_dict()), optimizer


@pytest.mark.parametrize("kind", [Counting, Elementwise])
@pytest.mark.parametrize("changes", [False, True])
def test_counters_and_keys_added_later(kind: type[Counting], changes: bool) -> None:
    expected, plain = train(kind, changes=changes)

    def rank(group: ThreadGroup) -> tuple[dict[str, Tensor], list[dict[str, Any]], list[dict[str, Any]]]:
        params, sharded = train(lambda params: ShardedOptimizer(kind(params), group, shares=(3, 1, 0)), changes=changes)
        groups = [{k: v for k, v in settings.items() if k != "params"} for settings in sharded.param_groups]
        return params, groups, sharded.state_dict()["param_groups"]

    for params, groups, saved in on_threads(3, rank):
        assert_equal(params, expected)
        assert groups == [{k: v for k, v in one.items() if k != "params"} for one in plain.param_groups]
        assert saved == plain.state_dict()["param_groups"]
        if not changes:
            assert [one["k"] for one in saved] == [4, 4]


def test_a_scheduler_of_the_optimizer_that_was_made_before_still_counts() -> None:
    param = nn.Parameter(torch.ones(2))
    plain = torch.optim.SGD([param], lr=1.0)
    scheduler = LambdaLR(plain, lambda position: 0.5**position)
    optimizer = ShardedOptimizer(plain, SoloGroup())
    for expected in (0.0, -0.5):
        param.grad = torch.ones(2)
        optimizer.step()
        scheduler.step()
        assert_equal(param.detach(), torch.full((2,), expected))


def test_a_loaded_counter_goes_on() -> None:
    def make() -> ShardedOptimizer:
        return ShardedOptimizer(Counting([nn.Parameter(torch.ones(2))]), SoloGroup())

    first = make()
    for _ in range(3):
        first.step()
    second = make()
    second.load_state_dict(first.state_dict())
    assert second.inner.param_groups[0]["k"] == 3
    second.step()
    assert (second.param_groups[0]["k"], second.inner.param_groups[0]["k"]) == (4, 4)


def test_a_rate_that_is_a_tensor_is_shared() -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer = ShardedOptimizer(torch.optim.AdamW([param], lr=torch.tensor(0.1), foreach=False), SoloGroup())
    optimizer.param_groups[0]["lr"].fill_(0.5)
    param.grad = torch.ones(2)
    optimizer.step()
    assert float(optimizer.inner.param_groups[0]["lr"]) == 0.5
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.step()
    assert optimizer.inner.param_groups[0]["lr"] == 0.25


def test_a_number_over_all_tensors_is_refused_not_computed_from_a_part() -> None:
    with pytest.raises(InputError, match=r"Estimating cannot be sharded: it keeps 'd' .* on rank 0, .* on rank 1"):
        on_threads(2, lambda group: train(lambda params: ShardedOptimizer(Estimating(params), group), changes=False))
    assert train(lambda params: ShardedOptimizer(Estimating(params), SoloGroup()), changes=False)
