"""Optimizers that are not Adam, from the run's settings to its state: whole tensors, counters in groups, MuonAdamW."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

from tests.api.loops import train_loop
from tests.parallel.parts import Counting
from tests.ranks import Silent
from tests.train.exact_runs import OPTIMIZERS, Net, X, Y, assert_exact, loss_and_count, make_muon, mean_loss, train
from tests.train.strategy_tasks import assert_same_optimizer
from uneven import fit
from uneven.data.tensors import TensorData
from uneven.errors import InputError
from uneven.train.policies import NO_RATE


class OwnRate(Optimizer):
    """Finds its rate from its steps, and has lr=None in its groups, as an Adafactor of relative steps does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in (param for settings in self.param_groups for param in settings["params"]):
            if param.grad is not None:
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                param.sub_(0.05 * param.grad / state["step"])


MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.05),
    "counting": Counting,
    "muon": make_muon,
    "own-rate": OwnRate,
}


@pytest.fixture(autouse=True)
def _makers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, make in {"sgd": OPTIMIZERS["sgd"], **MAKERS}.items():
        monkeypatch.setitem(OPTIMIZERS, name, make)


@pytest.mark.parametrize("name", ["adafactor", "counting"])
@pytest.mark.parametrize("strategy", ["zero1", "zero1-flat", "zero2"])
def test_what_is_not_elementwise_equals_one_device(name: str, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    common: dict[str, Any] = {
        "optimizer": name,
        "global_batch_size": 24,
        "scheduler": lambda optimizer: StepLR(optimizer, 2, 0.5),
        "scheduler_interval": "step",
    }
    dense = train(1, **common)[0]
    said: list[str] = []
    monkeypatch.setattr(Silent, "say", lambda _, lines: said.extend(lines))
    ours = train(3, strategy=strategy, shares=(5, 0, 2), memory_shares=(1, 3, 0), **common)
    assert_exact(ours, dense, name, torch.float64)
    assert_same_optimizer(ours[0].state, dense.state)
    kind = type(MAKERS[name]([nn.Parameter(torch.ones(1))])).__name__
    line = f"  {strategy}: bytes as given, 25 : 75 : 0 %, in whole tensors: {kind} is not known to be elementwise"
    assert said.count(line) == 3


def test_a_trial_step_leaves_no_trace_in_a_counter() -> None:
    """balanced measures each rank with real steps; what they counted in the group must not stay."""
    dense = train(1, optimizer="counting", global_batch_size=24)[0]
    ours = train(2, optimizer="counting", policy="balanced", global_batch_size=24)
    assert_exact(ours, dense, "counting", torch.float64)
    assert [group["k"] for group in ours[0].state.param_groups] == [group["k"] for group in dense.state.param_groups]


def test_an_optimizer_without_a_learning_rate_equals_one_device() -> None:
    dense = train(1, optimizer="own-rate", global_batch_size=24)[0]
    assert [entry["lr"] for entry in dense.state.history] == [None, None]
    assert_exact(train(2, optimizer="own-rate", global_batch_size=24), dense, "own-rate", torch.float64)


def test_a_learning_rate_that_is_not_there_is_not_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(Silent, "say", lambda _, lines: said.extend(lines))
    common: dict[str, Any] = {"optimizer": "own-rate", "policy": "cadence", "shares": (1, 1), "batch_size": 8}
    scaled, plain = train(2, **common)[0], train(2, lr_scale=1.0, **common)[0]
    assert all(torch.equal(value, plain.state.params[name]) for name, value in scaled.state.params.items())
    assert set(said) == {NO_RATE}
    with pytest.raises(InputError, match=r"lr_scale=2.0 with an optimizer that has no learning rate \(lr=None\)"):
        train(1, optimizer="own-rate", lr_scale=2.0)


@pytest.mark.parametrize("strategy", ["fsdp", "tensor", "sequence"])
def test_pieces_are_refused_before_a_rank_starts(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uneven.launch.run.train_on_ranks", None)
    with pytest.raises(InputError, match=rf"strategy='{strategy}' gives .* Adafactor .* strategy='zero1' or 'zero2'"):
        fit(
            model=lambda: Net(torch.float32),
            optimizer=MAKERS["adafactor"],
            step=mean_loss,
            dataset=TensorData(X, Y),
            batch_size=8,
            epochs=1,
            devices="cpu,cpu",
            strategy=strategy,
            progress="off",
        )


@pytest.mark.usefixtures("muon_in_fp64")
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1}, {"accumulate": 3}, {"step": loss_and_count}])
@pytest.mark.parametrize("strategy", [None, "zero1", "ddp-flat"])
def test_muon_over_the_ranks_equals_one_device(strategy: str | None, options: dict[str, Any]) -> None:
    common: dict[str, Any] = {
        "optimizer": "muon",
        "global_batch_size": 24,
        "scheduler": lambda optimizer: StepLR(optimizer, 2, 0.5),
        **options,
    }
    dense = train(1, **common)[0]
    ours = train(3, shares=(5, 0, 2), strategy=strategy, **common)
    assert_exact(ours, dense, "muon", torch.float64)
    assert_same_optimizer(ours[0].state, dense.state)


@pytest.mark.usefixtures("muon_in_fp64")
@pytest.mark.parametrize("strategy", [None, "ddp-flat"])
def test_gradients_that_muon_does_not_hold_count_in_the_norm(
    strategy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPTIMIZERS, "part", lambda params: make_muon([p for p in params if p.shape != (9,)]))
    common: dict[str, Any] = {"optimizer": "part", "global_batch_size": 24, "max_grad_norm": 0.01}
    dense = train(1, **common)[0]
    for result in train(3, shares=(5, 0, 2), strategy=strategy, **common):
        for key, value in dense.state.params.items():
            torch.testing.assert_close(result.state.params[key], value, rtol=1e-10, atol=1e-10)


def test_muon_runs_its_three_phases_in_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicated it would update both matrices on both ranks, and an all-reduce would have summed the gradients."""
    updated: list[int] = []
    plain = torch.optim.Muon.step

    def count(self: Any, closure: Any = None) -> Any:
        updated.append(sum(len(group["params"]) for group in self.param_groups))
        return plain(self, closure)

    monkeypatch.setattr(torch.optim.Muon, "step", count)
    monkeypatch.setattr("uneven.train.prepare._make_replicated", None)
    train(2, optimizer="muon", shares=(1, 1), global_batch_size=35, epochs=1)
    assert updated == [1, 1] * 2, "two slots, and each rank orthogonalises the matrix that it owns"


@pytest.mark.usefixtures("muon_in_fp64")
def test_muon_in_a_loop_of_ones_own() -> None:
    dense = train_loop(1, batch_size=24, optimizer=make_muon)[0]
    for state in train_loop(2, batch_size=12, optimizer=make_muon):
        assert {"first.weight.momentum_buffer", "second.bias.exp_avg"} <= state.optimizer.keys()
        for key, value in dense.params.items():
            torch.testing.assert_close(state.params[key], value, rtol=1e-10, atol=1e-10)


def test_muon_under_a_strategy_that_divides_more_is_refused() -> None:
    with pytest.raises(InputError, match=r"strategy='zero2' with MuonAdamW.*leave the strategy out, or use 'zero1'"):
        train(2, optimizer="muon", strategy="zero2")
