"""Activations kept, recomputed or offloaded: the same gradients, with every strategy."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.fsdp_nets import Tower, batch, make_adamw
from tests.ranks import ThreadGroup, on_threads
from uneven.parallel.activations import Activations
from uneven.parallel.ddp import DDPBucketed, Zero2
from uneven.parallel.fsdp import FSDP

ROWS = len(batch(0))


def gradients(model: nn.Module) -> list[Tensor]:
    model(batch(0)).square().sum().backward()
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


@pytest.mark.parametrize("policy", ["keep", "recompute", "offload"])
def test_gradients_are_the_same_and_close_undoes_it(policy: str) -> None:
    model = Tower()
    kept = Activations(model, policy)
    torch.testing.assert_close(gradients(model), gradients(Tower()), rtol=0, atol=0)
    assert len({one.policy for one in kept.blocks}) == 1
    kept.close()
    assert all("forward" not in vars(block) for block in model.blocks)
    with torch.no_grad():
        model(batch(0))


def test_a_block_that_is_recomputed_runs_twice_and_keeps_little() -> None:
    counts: dict[str, list[int]] = {}
    for policy in ("keep", "recompute"):
        model, calls = Tower(), []
        model.blocks[0].up.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        Activations(model, policy)
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t.numel()) or t, lambda t: t):
            loss = model(batch(0)).sum()
        loss.backward()
        counts[policy] = [len(calls), sum(saved)]
    assert counts["keep"][0] == 1
    assert counts["recompute"][0] == 2
    assert counts["recompute"][1] < counts["keep"][1] / 2


@pytest.mark.parametrize(("fits", "recomputed"), [(0, 3), (1, 2), (2, 1), (3, 0)])
def test_auto_recomputes_the_largest_until_the_rest_fits(fits: int, recomputed: int) -> None:
    model = Tower()
    measured = Activations(model, "auto", measure=lambda: model(batch(0)), budget_bytes=10**9)
    each = measured.blocks[0].bytes
    assert each
    assert {one.bytes for one in measured.blocks} == {each}, "three equal blocks"
    assert each >= ROWS * 12 * 8, "at least the inner activations"
    chosen = Activations(Tower(), "keep")
    assert [one.policy for one in chosen.blocks] == ["keep"] * 3
    model = Tower()
    found = Activations(model, "auto", measure=lambda: model(batch(0)), budget_bytes=fits * each)
    assert [one.policy for one in found.blocks].count("recompute") == recomputed
    torch.testing.assert_close(gradients(model), gradients(Tower()), rtol=0, atol=0)


@pytest.mark.parametrize("policy", ["recompute", "offload"])
@pytest.mark.parametrize("wrap", [DDPBucketed, Zero2, FSDP])
def test_with_every_strategy(wrap: Callable[..., Any], policy: str) -> None:
    def train(group: ThreadGroup, saves: bool) -> dict[str, Tensor]:
        model = Tower()
        strategy = wrap(model, make_adamw, group)
        if saves:
            Activations(model, policy)
        for step in range(2):
            (strategy.module(batch(step).chunk(2)[group.rank]).square().sum() / ROWS).backward()
            strategy.optimizer.step()
            strategy.optimizer.zero_grad()
        found: dict[str, Tensor] = strategy.full_state().model
        return found

    plain = on_threads(2, lambda group: train(group, False))
    saving = on_threads(2, lambda group: train(group, True))
    torch.testing.assert_close(saving, plain, rtol=1e-12, atol=1e-14)


def test_wrong_settings_are_told() -> None:
    with pytest.raises(ValueError, match="keep, recompute, offload, auto"):
        Activations(Tower(), "some")
    for options in ({}, {"budget_bytes": 3}):
        with pytest.raises(ValueError, match="needs both"):
            Activations(Tower(), "auto", **options)
    with pytest.raises(ValueError, match="belong to"):
        Activations(Tower(), "recompute", measure=lambda: None, budget_bytes=1)


def test_a_recomputed_batchnorm_moves_its_running_statistics_once() -> None:
    def train(policy: str) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3), nn.BatchNorm1d(3)))
        Activations(model, policy, blocks=[model[1]])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.randn(5, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return dict(model.state_dict())

    torch.testing.assert_close(train("recompute"), train("keep"), rtol=0, atol=0)


def functional(model: nn.Module, x: Tensor) -> Tensor:
    """A forward with other params in the place of the model's, which are back before backward."""
    nearby = {name: 1.5 * param for name, param in model.named_parameters()}
    return torch.func.functional_call(model, nearby, x).square().sum()


def power_iteration(model: nn.Module, x: Tensor) -> Tensor:
    """A forward that changes buffers which it computes with."""
    if not nn.utils.parametrize.is_parametrized(model[1][0]):  # type: ignore[index, arg-type]
        nn.utils.parametrizations.spectral_norm(model[1][0])  # type: ignore[index, arg-type]
    return model(x).square().sum()  # type: ignore[no-any-return]


def gradient_penalty(model: nn.Module, x: Tensor) -> Tensor:
    """A backward through a backward."""
    x = x.clone().requires_grad_()
    out = model(x).square().sum()
    return out + torch.autograd.grad(out, x, create_graph=True)[0].square().sum()  # type: ignore[no-any-return]


def other_mode(model: nn.Module, x: Tensor) -> Tensor:
    """A model that is put into another mode before backward."""
    loss = model.train()(x).square().sum()
    model.eval()
    return loss  # type: ignore[no-any-return]


@pytest.mark.parametrize("loss_of", [functional, power_iteration, gradient_penalty, other_mode])
def test_a_block_is_recomputed_as_its_forward_began(loss_of: Callable[[nn.Module, Tensor], Tensor]) -> None:
    def train(policy: str) -> dict[str, Tensor]:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3))
        model = nn.Sequential(nn.Linear(4, 6), block, nn.Linear(3, 2)).double()
        Activations(model, policy, blocks=[block])
        for _ in range(2):
            loss_of(model, torch.randn(5, 4).double()).backward()
        return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}

    torch.testing.assert_close(train("recompute"), train("keep"), rtol=1e-12, atol=1e-12)


def test_a_measurement_on_few_samples_is_scaled() -> None:
    model = Tower()
    each = Activations(model, "auto", measure=lambda: model(batch(0)), budget_bytes=10**9).blocks[0].bytes
    assert each
    found = Activations(model, "auto", measure=lambda: model(batch(0)), budget_bytes=5 * each, scale=2.0)
    assert [block.policy for block in found.blocks] == ["recompute", "keep", "keep"]
    assert found.blocks[0].bytes == 2 * each
