"""A tag used before it is set is its value in the call before."""

import copy

import pytest
import torch
from torch import nn

from tests.graph.test_verbs import TwoInputs
from uneven.errors import InputError
from uneven.graph.flow import FlowBuilder


def recurrent(**options: object) -> tuple[TwoInputs, nn.Module]:
    torch.manual_seed(0)
    cell = TwoInputs()
    return cell, FlowBuilder.from_(cell).using("h", **options).tag("h").build(torch.ones(2, 4))  # type: ignore[arg-type]


def test_state_goes_on_from_call_to_call_and_starts_with_zeros() -> None:
    cell, graph = recurrent()
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    first = cell(x, torch.zeros(3, 4))
    assert torch.equal(graph(x), first)
    assert torch.equal(graph(y), cell(y, first))
    graph.reset_state()
    assert torch.equal(graph(x), first), "forgotten"


def test_gradients_stop_at_the_call_before() -> None:
    cell, graph = recurrent()
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    graph(x)
    graph(y).sum().backward()
    found = [param.grad.clone() for param in cell.parameters()]
    cell.zero_grad()
    cell(y, cell(x, torch.zeros(3, 4)).detach()).sum().backward()
    for mine, param in zip(found, cell.parameters(), strict=True):
        torch.testing.assert_close(mine, param.grad)


def test_gradients_flow_on_where_asked_for() -> None:
    cell, graph = recurrent(detach=False)
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    graph(x)
    graph(y).sum().backward()
    found = [param.grad.clone() for param in cell.parameters()]
    cell.zero_grad()
    cell(y, cell(x, torch.zeros(3, 4))).sum().backward()
    for mine, param in zip(found, cell.parameters(), strict=True):
        torch.testing.assert_close(mine, param.grad)


def test_a_start_of_its_own() -> None:
    cell, graph = recurrent(start=torch.ones_like)
    x = torch.randn(3, 4)
    assert torch.equal(graph(x), cell(x, torch.ones(3, 4)))


def test_several_steps_train() -> None:
    _, graph = recurrent()
    optimizer = torch.optim.SGD(graph.parameters(), lr=0.1)
    losses = []
    x = torch.randn(8, 4)
    for _ in range(20):
        loss = (graph(x) - 0.5).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_a_batch_of_another_size_is_told() -> None:
    _, graph = recurrent()
    graph(torch.randn(3, 4))
    with pytest.raises(InputError, match=r"state 'h' is of 3 samples and this batch has 2.*reset_state"):
        graph(torch.randn(2, 4))


def test_a_state_of_another_shape_needs_a_start() -> None:
    with pytest.raises(InputError, match=r"node 'count'.*\.using\('count', start=\.\.\.\)"):
        FlowBuilder().fork(nn.Bilinear(4, 1, 1)).using("count").tag("count").build(torch.ones(2, 4))


def test_copies_and_state_dicts_hold_no_state() -> None:
    _, graph = recurrent()
    graph(torch.randn(3, 4))
    assert not any("memory" in name for name in graph.state_dict())
    fresh = copy.deepcopy(graph)
    graph.reset_state()
    x = torch.randn(5, 4)
    assert torch.equal(fresh(x), graph(x))
