"""Activations kept, computed again or on the host: the same gradients, with every strategy."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.test_fsdp import Tower, batch, make_adamw
from tests.ranks import ThreadGroup, on_threads
from uneven.parallel.activations import Activations
from uneven.parallel.ddp_bucketed import DDPBucketed
from uneven.parallel.fsdp import FSDP
from uneven.parallel.zero2 import Zero2

ROWS = len(batch(0))


def gradients(model: nn.Module) -> list[Tensor]:
    model(batch(0)).square().sum().backward()
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


@pytest.mark.parametrize("policy", ["none", "blocks", "offload"])
def test_gradients_are_the_same_and_close_undoes_it(policy: str) -> None:
    model = Tower()
    kept = Activations(model, policy)
    torch.testing.assert_close(gradients(model), gradients(Tower()), rtol=0, atol=0)
    assert len({one.treatment for one in kept.kept}) == 1
    kept.close()
    assert all("forward" not in vars(block) for block in model.blocks)
    with torch.no_grad():
        model(batch(0))


def test_a_block_that_is_computed_again_runs_twice_and_keeps_little() -> None:
    counts: dict[str, list[int]] = {}
    for policy in ("none", "blocks"):
        model, calls = Tower(), []
        model.blocks[0].up.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        Activations(model, policy)
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t.numel()) or t, lambda t: t):
            loss = model(batch(0)).sum()
        loss.backward()
        counts[policy] = [len(calls), sum(saved)]
    assert counts["none"][0] == 1
    assert counts["blocks"][0] == 2
    assert counts["blocks"][1] < counts["none"][1] / 2


@pytest.mark.parametrize(("fits", "again"), [(0, 3), (1, 2), (2, 1), (3, 0)])
def test_selective_computes_the_largest_again_until_the_rest_fits(fits: int, again: int) -> None:
    model = Tower()
    measured = Activations(model, "selective", measure=lambda: model(batch(0)), budget_bytes=10**9)
    each = measured.kept[0].bytes
    assert each
    assert {one.bytes for one in measured.kept} == {each}, "three equal blocks"
    assert each >= ROWS * 12 * 8, "at least the inner activations"
    chosen = Activations(Tower(), "none")
    assert [one.treatment for one in chosen.kept] == ["keep"] * 3
    model = Tower()
    found = Activations(model, "selective", measure=lambda: model(batch(0)), budget_bytes=fits * each)
    assert [one.treatment for one in found.kept].count("again") == again
    torch.testing.assert_close(gradients(model), gradients(Tower()), rtol=0, atol=0)


@pytest.mark.parametrize("policy", ["blocks", "offload"])
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
    with pytest.raises(ValueError, match="none, blocks, selective, offload"):
        Activations(Tower(), "some")
    for options in ({}, {"budget_bytes": 3}):
        with pytest.raises(ValueError, match="needs both"):
            Activations(Tower(), "selective", **options)
    with pytest.raises(ValueError, match="belong to"):
        Activations(Tower(), "blocks", measure=lambda: None, budget_bytes=1)
