"""Optimizers that treat elements by themselves are cut; all others get whole tensors, or are refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from tests.parallel.parity import Net
from tests.parallel.parts import assert_equal, step, trained
from tests.ranks import ThreadGroup, on_threads
from uneven.comm.group import SoloGroup
from uneven.errors import InputError
from uneven.parallel import FSDP, Columns, Rows, ShardedOptimizer, TensorParallel, Zero1, Zero2
from uneven.parallel.elementwise import ELEMENTWISE, is_elementwise, is_known

Make = Callable[[Any], Optimizer]
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {"dampening": 0.2, "momentum": 0.5}],
    "Adam": [{"amsgrad": True, "weight_decay": 0.1}, {"foreach": False}, {"fused": True}],
    "AdamW": [{"amsgrad": True, "maximize": True}],
    "NAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RMSprop": [{"momentum": 0.9, "centered": True, "weight_decay": 0.1}],
    "Adagrad": [{"lr_decay": 0.1, "initial_accumulator_value": 0.2}],
    "ASGD": [{"t0": 1, "lambd": 0.1}],
}
CASES = [(kind, options) for kind in ELEMENTWISE for options in ({}, *OPTIONS.get(kind.__name__, []))]


class Normed(Optimizer):
    """One norm per tensor, as LAMB and LARS have it; state in nested lists, as Shampoo has it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for settings in self.param_groups:
            for param in settings["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state.setdefault("past", {"norms": [torch.zeros(()), torch.zeros(2)], "count": 0})
                state["past"]["count"] += 1
                state["past"]["norms"][0] += param.grad.norm().float()
                param.sub_(param.grad * (settings["lr"] * param.norm() / (param.grad.norm() + 1e-6)))


WHOLE: dict[str, Make] = {
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.05),
    "a norm per tensor": Normed,
    "matrices": lambda params: torch.optim.Muon([param for param in params if param.dim() == 2], lr=0.02),
}


@pytest.mark.parametrize(("kind", "options"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_what_is_listed_is_elementwise_bit_by_bit(kind: type[Optimizer], options: dict[str, Any]) -> None:
    make: Make = lambda params: kind(params, lr=0.05, **options)  # type: ignore[call-arg]  # noqa: E731
    plain_model, plain = trained(make)

    def rank(group: ThreadGroup) -> tuple[dict[str, Tensor], dict[str, Any]]:
        model, sharded = trained(lambda params: ShardedOptimizer(make(params), group, shares=(5, 2, 1)))
        assert isinstance(sharded, ShardedOptimizer)
        assert not sharded.by_tensors
        state = sharded.state_dict()
        again = Net("plain", 0)
        other = ShardedOptimizer(make(again.parameters()), group)
        again.load_state_dict(model.state_dict())
        other.load_state_dict(state)
        step(again, other, 2)
        return dict(again.state_dict()), state

    expected = plain.state_dict()
    found = on_threads(3, rank)
    step(plain_model, plain, 2)
    for params, state in found:
        assert_equal(params, dict(plain_model.state_dict()))
        assert state["param_groups"] == expected["param_groups"]


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("shares", [None, (1.0, 0.0, 3.0)])
def test_what_is_not_gets_whole_tensors_by_itself(name: str, shares: tuple[float, ...] | None) -> None:
    plain_model, plain = trained(WHOLE[name])

    def rank(group: ThreadGroup) -> tuple[dict[str, Tensor], dict[str, Any]]:
        model, sharded = trained(lambda params: ShardedOptimizer(WHOLE[name](params), group, shares=shares))
        assert isinstance(sharded, ShardedOptimizer)
        assert sharded.by_tensors
        return dict(model.state_dict()), sharded.state_dict()

    for params, state in on_threads(3, rank):
        assert_equal(params, dict(plain_model.state_dict()))
        assert_equal(state["state"], plain.state_dict()["state"])


@pytest.mark.parametrize("wrap", [Zero1, Zero2])
def test_zero1_and_zero2_choose_alike(wrap: Any) -> None:
    for make, by_tensors in ((WHOLE["adafactor"], True), (AdamW, False)):
        optimizer = wrap(nn.Linear(3, 2), make, SoloGroup()).optimizer
        assert optimizer.by_tensors is by_tensors


def test_subclasses_count_as_what_they_change() -> None:
    class Renamed(AdamW):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.5)

    class Changed(AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    class Said(Normed):
        is_elementwise = True

    class Denied(Adam):
        is_elementwise = False

    params = [nn.Parameter(torch.ones(2, 2))]
    assert [is_elementwise(kind(params)) for kind in (Renamed, Changed, Said, Denied)] == [True, False, True, False]  # type: ignore[operator]
    assert [is_known(kind(params)) for kind in (Renamed, Changed, Said, WHOLE["adafactor"])] == [
        True,
        False,
        False,
        True,
    ]  # type: ignore[operator]
    hooked = AdamW(params)
    hooked.register_step_pre_hook(lambda *_: None)
    assert not is_elementwise(hooked)


def test_where_there_are_only_pieces_it_is_refused_by_name() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))

    plan = {"0": Columns(), "2": Rows()}
    for wrap in (
        lambda module, make: FSDP(module, make, SoloGroup()),
        lambda module, make: FSDP(module, None, SoloGroup()).use_optimizer(make),
        lambda module, make: TensorParallel(module, make, SoloGroup(), plan=plan),
        lambda module, make: TensorParallel(module, make(module.parameters()), SoloGroup(), plan=plan),
        lambda module, make: ShardedOptimizer(make(module.parameters()), SoloGroup(), by_tensors=False),
    ):
        with pytest.raises(InputError, match=r"pieces of tensors, and Adafactor is not known .* use strategy='zero1'"):
            wrap(model(), WHOLE["adafactor"])
    with pytest.raises(InputError, match="LBFGS cannot be sharded"):
        ShardedOptimizer(torch.optim.LBFGS(model().parameters()), SoloGroup())
