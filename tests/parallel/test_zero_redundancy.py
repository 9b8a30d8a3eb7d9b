"""What PyTorch asks of its ZeroRedundancyOptimizer, asked of ours; the table in docs/parallel.md names what differs."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from tests.parallel.tower import assert_equal, inputs, run, tower
from tests.ranks import ThreadGroup, on_threads
from uneven.comm.group import SoloGroup
from uneven.errors import InputError
from uneven.parallel import FSDP, DDPBucketed, ShardedOptimizer, Zero1, Zero2


def one_param() -> nn.Parameter:
    param = nn.Parameter(torch.tensor([1.0]))
    param.grad = torch.tensor([1.0])
    return param


def test_a_state_dict_is_that_of_the_plain_optimizer_and_comes_back() -> None:
    param = one_param()
    optimizer = ShardedOptimizer(SGD([param], lr=0.1, momentum=0.9), SoloGroup())
    optimizer.step()
    assert_equal(param.detach(), torch.tensor([0.9]))
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict()
    assert state.keys() == {"state", "param_groups"}
    assert state["param_groups"][0]["lr"] == 0.1
    assert all(
        value == optimizer.param_groups[0][key] for key, value in state["param_groups"][0].items() if key != "params"
    )
    other = ShardedOptimizer(SGD([param], lr=0.01), SoloGroup())
    other.load_state_dict(state)
    assert (other.param_groups[0]["lr"], other.inner.param_groups[0]["lr"]) == (0.1, 0.1)
    param.grad = torch.tensor([1.0])
    other.step()
    torch.testing.assert_close(param.detach(), torch.tensor([0.71]))
    assert_equal(other.state_dict()["state"][0]["momentum_buffer"], torch.tensor([1.9]))


def test_schedulers_follow() -> None:
    ours, plain = one_param(), one_param()
    pairs = [(ours, ShardedOptimizer(SGD([ours], lr=0.01), SoloGroup())), (plain, SGD([plain], lr=0.01))]
    for param, optimizer in pairs:
        scheduler = StepLR(optimizer, 1)
        for _ in range(5):
            param.grad = torch.tensor([1.0])
            optimizer.step()
            scheduler.step()
    assert_equal(ours, plain)


def test_keyword_arguments_of_a_step_reach_the_optimizer_inside() -> None:
    class Noting(SGD):
        def step(self, closure: Any = None, noted: Any = None) -> Any:
            super().step()
            noted.append((closure, 5))

    noted: list[Any] = []
    param = one_param()
    optimizer = ShardedOptimizer(Noting([param], lr=0.1), SoloGroup())
    optimizer.step(noted=noted)
    optimizer.step(0, noted=noted)  # not a closure: handed down as it is
    assert noted == [(None, 5), (0, 5)]
    assert param.item() == pytest.approx(0.8)


def test_a_key_that_the_optimizer_adds_appears_outside() -> None:
    class Adding(SGD):
        def step(self, closure: Any = None) -> Any:
            super().step()
            self.param_groups[0]["new"] = 0.1

    def rank(group: ThreadGroup) -> Any:
        optimizer = ShardedOptimizer(Adding([one_param()], lr=0.1), group)
        optimizer.step()
        return optimizer.param_groups[0]["new"], optimizer.state_dict()["param_groups"][0]["new"]

    assert on_threads(2, rank) == [(0.1, 0.1)] * 2, "also on the rank that owns nothing"


def test_an_optimizer_whose_step_takes_no_closure() -> None:
    class Bare(SGD):
        def step(self) -> Any:  # type: ignore[override]
            return super().step()

    param = one_param()
    optimizer = ShardedOptimizer(Bare([param], lr=0.1), SoloGroup())
    optimizer.step()
    optimizer.step(lambda: torch.tensor(3.0))
    assert param.item() == pytest.approx(0.8)


@pytest.mark.parametrize("wrap", [Zero1, Zero2, FSDP, DDPBucketed])
def test_a_closure_runs_once_and_its_loss_comes_back(wrap: Any) -> None:
    plain = tower()
    run(plain, optimizer := AdamW(plain.parameters(), lr=0.01))
    del optimizer

    def rank(group: ThreadGroup) -> tuple[list[float], dict[str, Tensor]]:
        strategy = wrap(tower(), lambda params: AdamW(params, lr=0.01), group)
        losses = []
        for number in range(3):

            def closure(number: int = number) -> Tensor:
                strategy.optimizer.zero_grad()
                loss: Tensor = strategy.module(inputs(number)).square().sum() / 2
                loss.backward()
                return loss

            losses.append(strategy.optimizer.step(closure=closure).item())
        return losses, strategy.full_params()

    for losses, params in on_threads(2, rank):
        assert len(losses) == 3
        torch.testing.assert_close(params, dict(plain.state_dict().items()), rtol=1e-10, atol=1e-12)


def test_a_closure_that_the_optimizer_runs_twice_is_refused() -> None:
    class Twice(SGD):
        def step(self, closure: Any = None) -> Any:
            super().step()
            closure()
            return closure()

    optimizer = ShardedOptimizer(Twice([one_param()], lr=0.1), SoloGroup())
    with pytest.raises(InputError, match="runs its closure several times"):
        optimizer.step(lambda: 1.0)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none: bool) -> None:
    model = tower()
    optimizer = ShardedOptimizer(SGD(model.parameters(), lr=0.1), SoloGroup())
    model(inputs(0)).sum().backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    for param in model.parameters():
        assert param.grad is None if set_to_none else torch.count_nonzero(param.grad) == 0  # type: ignore[arg-type]


def test_what_is_no_list_of_params_is_an_error_of_the_plain_optimizer() -> None:
    for params, error in (
        ([], ValueError),
        (torch.randn(1), TypeError),
        (1.2, TypeError),
        ([torch.ones(1), 42], TypeError),
    ):
        with pytest.raises(error):
            ShardedOptimizer(SGD(params, lr=0.1), SoloGroup())  # type: ignore[arg-type]


def test_several_dtypes_are_taken_and_sparse_params_are_not() -> None:
    single, double = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4, dtype=torch.float64))

    def rank(group: ThreadGroup) -> list[Tensor]:
        params = [nn.Parameter(single.detach().clone()), nn.Parameter(double.detach().clone())]
        optimizer = ShardedOptimizer(SGD(params, lr=0.5), group)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        return [param.detach() for param in params]

    for found in on_threads(2, rank):
        assert_equal(found, [torch.full((3,), 0.5), torch.full((4,), 0.5, dtype=torch.float64)])
    sparse = nn.Parameter(torch.sparse_coo_tensor(size=(2, 3), check_invariants=False))
    for params in ([sparse], [nn.Parameter(torch.ones(1)), sparse]):
        with pytest.raises(InputError, match="is sparse"):
            ShardedOptimizer(SGD(params, lr=0.1), SoloGroup())


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_a_param_that_rests_for_some_steps_and_states_that_cross_over(kind: Any, maximize: bool) -> None:
    def train(model: nn.Module, optimizer: Optimizer, ranks: int, numbers: range) -> None:
        for number in numbers:
            next(model.parameters()).requires_grad_(number % 2 == 0)
            optimizer.zero_grad()
            (model(inputs(number)).abs().sum() / ranks).backward()
            optimizer.step()

    def make(params: Any) -> Optimizer:
        made: Optimizer = kind(params, lr=0.01, maximize=maximize)
        return made

    plain_model = tower()
    plain = make(plain_model.parameters())
    train(plain_model, plain, 1, range(4))
    halfway = copy.deepcopy(plain.state_dict())
    middle = {name: value.clone() for name, value in plain_model.state_dict().items()}
    train(plain_model, plain, 1, range(4, 6))

    def rank(group: ThreadGroup) -> tuple[dict[str, Tensor], Any, dict[str, Tensor]]:
        strategy = Zero1(tower(), make, group, shares=(2, 1))
        train(strategy.module, strategy.optimizer, group.world_size, range(4))
        params = strategy.full_params()
        strategy.optimizer.consolidate_state_dict(to=1)
        if group.rank == 1:
            state = strategy.optimizer.state_dict()
        else:
            state = None
            with pytest.raises(InputError, match="gathered on rank 1"):
                strategy.optimizer.state_dict()
        strategy.optimizer.load_state_dict(halfway)  # of the plain optimizer
        train(strategy.module, strategy.optimizer, group.world_size, range(4, 6))
        return params, state, strategy.full_params()

    first, second = on_threads(2, rank)
    for params, _, ended in (first, second):
        torch.testing.assert_close(params, middle, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(ended, dict(plain_model.state_dict()), rtol=1e-10, atol=1e-12)
    again_model = tower()
    again_model.load_state_dict(middle)
    again = make(again_model.parameters())
    again.load_state_dict(second[1])
    train(again_model, again, 1, range(4, 6))
    torch.testing.assert_close(dict(again_model.state_dict()), dict(plain_model.state_dict()), rtol=1e-10, atol=1e-12)


def test_uneven_inputs_need_no_join() -> None:
    """Rank i has i more inputs than rank 0; whoever has none left takes part without samples."""
    many = [torch.randn(6, 5, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in range(6)]
    plain = tower()
    optimizer = Adam(plain.parameters(), lr=0.01)
    rounds = [[0, 2], [1, 3], [4], [5]]  # of two ranks, with 2 and 4 inputs
    for numbers in rounds:
        optimizer.zero_grad()
        sum(plain(many[number]).square().sum() for number in numbers).backward()  # type: ignore[union-attr]
        optimizer.step()

    def rank(group: ThreadGroup) -> dict[str, Tensor]:
        strategy = Zero1(tower(), lambda params: Adam(params, lr=0.01), group)
        own = many[:2] if group.rank == 0 else many[2:]
        for place in range(4):
            strategy.optimizer.zero_grad()
            if place < len(own):
                strategy.module(own[place]).square().sum().backward()
            else:
                strategy.backward_without_samples()
            strategy.optimizer.step()
        return strategy.full_params()

    for params in on_threads(2, rank):
        torch.testing.assert_close(params, dict(plain.state_dict()), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("frozen", [(), ("0.weight", "2.bias")])
def test_state_that_is_made_at_once_is_sharded_too(frozen: tuple[str, ...]) -> None:
    """Of frozen params Adagrad has one as well."""

    def make() -> tuple[nn.Sequential, Adagrad]:
        model = tower()
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        return model, Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.3)

    plain_model, plain = make()
    run(plain_model, plain, 1)

    def rank(group: ThreadGroup) -> tuple[dict[str, Tensor], Any]:
        """Made and trained before it is sharded."""
        model, optimizer = make()
        run(model, optimizer, 1)
        sharded = ShardedOptimizer(optimizer, group)
        state = sharded.state_dict()["state"]
        sharded.load_state_dict(sharded.state_dict())
        assert_equal(sharded.state_dict()["state"], state)
        return run(model, sharded, 2), state

    saved = copy.deepcopy(plain.state_dict()["state"])
    expected = run(plain_model, plain, 2)
    for params, state in on_threads(2, rank):
        assert list(state) == list(saved)
        assert_equal(state, saved)
        assert_equal(params, expected)
