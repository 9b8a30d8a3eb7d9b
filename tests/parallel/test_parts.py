"""Strategies as parts: the optimizer before, with or after them, whole params and gradients under any of them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.parts import WRAPS, make_adamw
from tests.parallel.tower import inputs, run, tower
from tests.ranks import ThreadGroup, on_threads
from uneven.comm.group import Group, SoloGroup
from uneven.comm.torch_group import as_group
from uneven.errors import InputError
from uneven.parallel import FSDP, MuonAdamW, Strategy, TensorParallel
from uneven.parallel.muon_adamw import ThreePhase


def train(strategy: Strategy, group: Group, steps: range) -> dict[str, Tensor | None]:
    """Returns the whole gradients of the last step. The same samples on all ranks, so that each counts its part."""
    parts = 1 if isinstance(strategy, TensorParallel) else group.world_size
    found: dict[str, Tensor | None] = {}
    for number in steps:
        strategy.optimizer.zero_grad()
        (strategy.module(inputs(number)).square().sum() / parts).backward()
        found = strategy.full_gradients()
        strategy.optimizer.step()
    return found


@pytest.mark.parametrize("when", ["factory", "before", "trained before", "after"])
@pytest.mark.parametrize("name", WRAPS)
def test_whenever_the_optimizer_is_made_it_trains_the_same(name: str, when: str) -> None:
    plain = tower()
    optimizer = make_adamw(plain.parameters())
    run(plain, optimizer, 1)
    begun = {key: value.clone() for key, value in plain.state_dict().items()}
    for number in (1, 2):
        optimizer.zero_grad()
        plain(inputs(number)).square().sum().backward()
        optimizer.step()
    gradients = {key: param.grad for key, param in plain.named_parameters()}

    def rank(group: ThreadGroup) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
        model = tower()
        begin = 0
        if when == "trained before":
            made = make_adamw(model.parameters())
            run(model, made, 1)
            strategy, begin = WRAPS[name](model, made, group), 1
        elif when == "after":
            strategy = WRAPS[name](model, None, group)
            with pytest.raises(InputError, match="has no optimizer yet: call use_optimizer"):
                strategy.optimizer.step()
            assert strategy.use_optimizer(make_adamw(model.parameters())) is strategy.optimizer
            with pytest.raises(InputError, match="has its optimizer already"):
                strategy.use_optimizer(make_adamw)
        else:
            strategy = WRAPS[name](model, make_adamw if when == "factory" else make_adamw(model.parameters()), group)
        found = train(strategy, group, range(begin, 3))
        params = strategy.full_params()
        strategy.close()
        return params, found

    assert any((value - begun[key]).abs().max() > 1e-3 for key, value in plain.state_dict().items())
    for params, found in on_threads(2, rank):
        torch.testing.assert_close(params, dict(plain.state_dict()), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found, gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in WRAPS if name != "TensorParallel"])
def test_a_gradient_that_no_rank_has_is_none_and_accessors_give_copies(name: str) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.used(x)
            return out

    def rank(group: ThreadGroup) -> None:
        model = Half()
        options = {"units": [model.used]} if name == "FSDP" else {}
        strategy: Any = FSDP(model, make_adamw, group, **options) if options else WRAPS[name](model, make_adamw, group)  # type: ignore[arg-type]
        strategy.module(torch.ones(1, 2)).sum().backward()
        found = strategy.full_gradients()
        assert found["unused.weight"] is None
        assert torch.equal(found["used.weight"], torch.full((2, 2), 2.0))
        before = strategy.full_params()
        before["used.weight"].zero_()
        found["used.weight"].zero_()
        assert strategy.full_params()["used.weight"].count_nonzero() == 4
        assert strategy.full_gradients()["used.weight"].count_nonzero() == 4
        strategy.close()

    on_threads(2, rank)


def test_muon_has_the_accessors_too_and_takes_more_params() -> None:
    def rank(group: ThreadGroup) -> tuple[dict[str, Tensor | None], float, dict[str, Tensor]]:
        model = tower()
        rest = [param for param in model.parameters() if param is not model[0].weight]
        groups = [{"params": [model[0].weight], "kind": "muon"}, {"params": rest[:-2], "kind": "adamw", "lr": 0.01}]
        optimizer = MuonAdamW(groups, group)
        optimizer.add_param_group({"params": rest[-2:], "kind": "adamw", "lr": 0.02})
        assert [settings["lr"] for settings in optimizer.param_groups] == [1e-3, 0.01, 0.02]
        strategy = ThreePhase(model, optimizer)
        (model(inputs(0)).square().sum() / group.world_size).backward()
        found = strategy.full_gradients()
        norm = float(strategy.clip(1e-3))
        clipped = strategy.full_gradients()
        torch.testing.assert_close(
            clipped, {key: value * 1e-3 / (norm + 1e-6) for key, value in found.items() if value is not None}
        )
        optimizer.step()
        optimizer.zero_grad()
        assert len(optimizer.state_dict()["state"]) == 6
        return found, norm, strategy.full_params()

    plain = tower()
    plain(inputs(0)).square().sum().backward()
    expected = {key: param.grad for key, param in plain.named_parameters()}
    norm = float(nn.utils.get_total_norm([param.grad for param in plain.parameters() if param.grad is not None]))
    first, second = on_threads(2, rank)
    for found, found_norm, params in (first, second):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        assert found_norm == pytest.approx(norm, rel=1e-9)
        torch.testing.assert_close(params, first[2], rtol=0, atol=0)


def test_an_optimizer_of_another_model_is_refused() -> None:
    other = make_adamw(tower().parameters())
    for wrap in WRAPS.values():
        with pytest.raises(InputError, match=r"AdamW holds a param of shape \(6, 5\) that is not the model's"):
            on_threads(2, lambda group, wrap=wrap: wrap(tower(), other, group))  # type: ignore[misc]


def test_what_a_group_may_be() -> None:
    own = SoloGroup()
    assert as_group(own) is own
    assert isinstance(as_group(None), SoloGroup)  # no process group was formed in this process
    with pytest.raises(InputError, match="group='gloo' must be a torch process group"):
        as_group("gloo")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="this rank is not in it"):
        as_group(torch.distributed.GroupMember.NON_GROUP_MEMBER)  # type: ignore[arg-type]
