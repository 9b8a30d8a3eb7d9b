"""A tag that is used before it is set means its value in the last call."""

import copy
import operator

import pytest
import torch
from torch import Tensor, fx, nn

from tests.graph.nets import TwoInputs
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
    grads = [param.grad.clone() for param in cell.parameters()]
    cell.zero_grad()
    cell(y, cell(x, torch.zeros(3, 4)).detach()).sum().backward()
    for grad, param in zip(grads, cell.parameters(), strict=True):
        torch.testing.assert_close(grad, param.grad)


def test_gradients_flow_on_where_asked_for() -> None:
    cell, graph = recurrent(detach=False)
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    graph(x)
    graph(y).sum().backward()
    grads = [param.grad.clone() for param in cell.parameters()]
    cell.zero_grad()
    cell(y, cell(x, torch.zeros(3, 4))).sum().backward()
    for grad, param in zip(grads, cell.parameters(), strict=True):
        torch.testing.assert_close(grad, param.grad)


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


def test_a_batch_of_another_size_is_refused() -> None:
    _, graph = recurrent()
    graph(torch.randn(3, 4))
    with pytest.raises(InputError, match=r"state 'h' has 3 samples and this batch has 2.*reset_state"):
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


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 5)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.cell(x, state)


def test_state_may_be_a_tuple() -> None:
    cell = Cell()
    start = lambda x: (x.new_zeros(len(x), 5), x.new_zeros(len(x), 5))  # noqa: E731
    flow = FlowBuilder.from_(cell).using("hc", start=start).tag("hc").through(operator.itemgetter(0))
    graph = flow.build(torch.ones(2, 4))
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    first = cell(x, start(x))
    assert torch.equal(graph(x), first[0])
    assert torch.equal(graph(y), cell(y, first)[0])


def test_the_batch_may_be_another_dimension_of_the_state() -> None:
    class Layers(nn.Module):
        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            return h + x.unsqueeze(0)

    start = lambda x: x.new_zeros(1, *x.shape)  # noqa: E731
    graph = FlowBuilder.from_(Layers()).using("h", start=start).tag("h").build(torch.ones(3, 4))
    x = torch.randn(3, 4)
    graph(x)
    assert torch.equal(graph(x), (x + x).unsqueeze(0))


def test_state_of_an_evaluation_is_no_obstacle_to_training_and_follows_the_precision() -> None:
    cell, graph = recurrent()
    with torch.inference_mode():
        graph(torch.randn(3, 4))
    graph(torch.randn(3, 4)).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        graph(torch.randn(3, 4))
    graph.reset_state()
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    graph(x)
    assert torch.equal(graph(y), cell(y, cell(x, torch.zeros(3, 4))))
    assert graph(y).dtype == torch.float32


def test_names_beside_a_state_are_free() -> None:
    torch.manual_seed(0)
    first, cell = nn.Linear(4, 4), TwoInputs()
    flow = (
        FlowBuilder.from_(first)
        .tag("memory_h")
        .through(nn.Identity())
        .tag("recall_h")
        .through(cell)
        .using("h")
        .tag("h")
    )
    graph = flow.build(torch.ones(2, 4))
    assert "memory_h.weight" in graph.state_dict()
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    once = cell(first(x), torch.zeros(3, 4))
    assert torch.equal(graph(x), once)
    assert torch.equal(graph(y), cell(first(y), once))


def test_a_dry_run_of_an_outer_graph_keeps_the_state_of_an_inner_one() -> None:
    cell, graph = recurrent()
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    graph(x)
    FlowBuilder.from_(graph).build(torch.ones(2, 4))
    assert torch.equal(graph(y), cell(y, cell(x, torch.zeros(3, 4))))


def test_what_is_remembered_survives_the_cleaning_of_fx() -> None:
    _, graph = recurrent()
    as_fx = fx.GraphModule(graph, graph.fx)
    assert not as_fx.graph.eliminate_dead_code()
