"""Every verb of the builder computes what the same thing written by hand computes: values and all gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.graph.nets import TwoInputs
from uneven.graph.flow import FlowBuilder
from uneven.graph.graph import Graph

ByHand = Callable[[Tensor], Tensor]


def linear(width_in: int = 4, width: int = 4) -> nn.Linear:
    return nn.Linear(width_in, width)


def through() -> tuple[FlowBuilder, ByHand]:
    a, b = linear(), linear(4, 3)
    return FlowBuilder.from_(a).through(torch.tanh).through(b), lambda x: b(torch.tanh(a(x)))


def also() -> tuple[FlowBuilder, ByHand]:
    a, b = linear(), linear()
    return FlowBuilder.from_(a).also(b), lambda x: a(x) + b(a(x))


def also_with() -> tuple[FlowBuilder, ByHand]:
    skip, b = linear(4, 6), linear(4, 6)
    return FlowBuilder().also_with(skip, b), lambda x: skip(x) + b(x)


def also_a_flow() -> tuple[FlowBuilder, ByHand]:
    a, b = linear(), linear()
    return FlowBuilder().also(FlowBuilder.from_(a).through(F.relu).through(b)), lambda x: x + b(F.relu(a(x)))


def fork() -> tuple[FlowBuilder, ByHand]:
    a, b, c = linear(), linear(), TwoInputs()
    flow = FlowBuilder.from_(a).fork(b).tag("aside").through(F.relu).through(c).using("aside")
    return flow, lambda x: c(F.relu(a(x)), b(a(x)))


def split_add() -> tuple[FlowBuilder, ByHand]:
    a, b, c = linear(), linear(), linear()
    return FlowBuilder().split([a, b, c]).merge("add"), lambda x: a(x) + b(x) + c(x)


def split_mean() -> tuple[FlowBuilder, ByHand]:
    a, b = linear(), linear()
    return FlowBuilder().split([a, b]).merge("mean"), lambda x: (a(x) + b(x)) / 2


def split_cat() -> tuple[FlowBuilder, ByHand]:
    a, b = linear(4, 2), linear(4, 3)
    return FlowBuilder().split([a, b]).merge("cat"), lambda x: torch.cat([a(x), b(x)], 1)


def split_function() -> tuple[FlowBuilder, ByHand]:
    a, b = linear(), linear()
    return FlowBuilder().split([a, b]).merge(torch.mul), lambda x: a(x) * b(x)


def split_tags() -> tuple[FlowBuilder, ByHand]:
    a, b, c = linear(), linear(), TwoInputs()
    flow = FlowBuilder().split([a, b]).tag("left", "right").merge("add").through(c).using("right")
    return flow, lambda x: c(a(x) + b(x), b(x))


def using_an_earlier_tag() -> tuple[FlowBuilder, ByHand]:
    a, b = linear(), TwoInputs()
    return FlowBuilder.from_(a).tag("early").through(F.relu).through(b).using("early"), lambda x: b(F.relu(a(x)), a(x))


def also_using() -> tuple[FlowBuilder, ByHand]:
    a, b = linear(), TwoInputs()
    return FlowBuilder.from_(a).tag("early").also(b).using("early"), lambda x: a(x) + b(a(x), a(x))


def loop_for() -> tuple[FlowBuilder, ByHand]:
    a, b = linear(), linear()
    return FlowBuilder.from_(a).loop(b).for_n(3), lambda x: b(b(b(a(x))))


def loop_using() -> tuple[FlowBuilder, ByHand]:
    a, b = linear(), TwoInputs()
    return FlowBuilder.from_(a).tag("start").loop(b).for_n(2).using("start"), lambda x: b(b(a(x), a(x)), a(x))


def loop_while_for_the_batch() -> tuple[FlowBuilder, ByHand]:
    a = linear()

    def by_hand(x: Tensor) -> Tensor:
        while x.norm() > 0.5:
            x = a(x) / 4
        return x

    return FlowBuilder().loop(FlowBuilder.from_(a).through(lambda x: x / 4)).while_(lambda x: x.norm() > 0.5), by_hand


def loop_until_per_sample() -> tuple[FlowBuilder, ByHand]:
    a = linear()

    def by_hand(x: Tensor) -> Tensor:
        rows = []
        for row in x:
            row = a(row) / 4
            while not row.norm() < 0.3:
                row = a(row) / 4
            rows.append(row)
        return torch.stack(rows)

    body = FlowBuilder.from_(a).through(lambda x: x / 4)
    return FlowBuilder().loop(body).until(lambda x: x.norm(dim=1) < 0.3), by_hand


def gate() -> tuple[FlowBuilder, ByHand]:
    router, experts = linear(4, 3), [linear(4, 5) for _ in range(3)]

    def by_hand(x: Tensor) -> Tensor:
        weights = router(x).softmax(-1)
        return sum((weights[:, i : i + 1] * expert(x) for i, expert in enumerate(experts)), torch.zeros(()))

    return FlowBuilder().gate(router, experts), by_hand


def gate_sigmoid() -> tuple[FlowBuilder, ByHand]:
    router, a, b = linear(4, 2), linear(), linear()

    def by_hand(x: Tensor) -> Tensor:
        weights = router(x).sigmoid()
        return weights[:, :1] * a(x) + weights[:, 1:] * b(x)

    return FlowBuilder().gate(router, [a, b], weighting="sigmoid"), by_hand


def switch_per_sample() -> tuple[FlowBuilder, ByHand]:
    selector, branches = linear(4, 3), [linear(4, 2) for _ in range(3)]

    def by_hand(x: Tensor) -> Tensor:
        chosen = selector(x).argmax(-1)
        return torch.stack([branches[int(one)](row) for row, one in zip(x, chosen, strict=True)])

    return FlowBuilder().switch(selector, branches), by_hand


def switch_by_integers() -> tuple[FlowBuilder, ByHand]:
    a, b = linear(), linear()
    flow = FlowBuilder().switch(lambda x: (x[:, 0] > 0).long(), [a, b])
    return flow, lambda x: torch.where((x[:, 0] > 0)[:, None], b(x), a(x))


def switch_for_the_batch() -> tuple[FlowBuilder, ByHand]:
    a, b = linear(), linear()
    return FlowBuilder().switch(lambda x: 1, [a, b]), b


def map_each() -> tuple[FlowBuilder, ByHand]:
    a = linear(2, 3)
    flow = FlowBuilder.from_(lambda x: x.view(-1, 2, 2)).map(a).each()
    return flow, lambda x: torch.stack([a(x[:, :2]), a(x[:, 2:])], 1)


def map_each_batched() -> tuple[FlowBuilder, ByHand]:
    a = linear(2, 3)
    flow = FlowBuilder.from_(lambda x: x.view(-1, 2, 2)).map(a).batched().each()
    return flow, lambda x: torch.stack([a(x[:, :2]), a(x[:, 2:])], 1)


def map_each_from_behind() -> tuple[FlowBuilder, ByHand]:
    a = linear(2, 3)
    flow = FlowBuilder.from_(lambda x: x.view(-1, 2, 2)).map(FlowBuilder.from_(a).through(lambda y: y.sum(-1))).each(-2)
    return flow, lambda x: torch.stack([a(x[:, :2]).sum(-1), a(x[:, 2:]).sum(-1)], 1)


def loop_until_per_sample_using() -> tuple[FlowBuilder, ByHand]:
    a, first = TwoInputs(), linear()

    def by_hand(x: Tensor) -> Tensor:
        rows = []
        for row in x:
            value, start = first(row), first(row)
            for _ in range(3):
                value = a(value, start)
                if value[0] > 0.2:
                    break
            rows.append(value)
        return torch.stack(rows)

    flow = FlowBuilder.from_(first).tag("start").loop(a).until(lambda x: x[:, 0] > 0.2, most=3).using("start")
    return flow, by_hand


def map_over() -> tuple[FlowBuilder, ByHand]:
    a, b = linear(2, 3), linear()
    flow = FlowBuilder.from_(b).fork(lambda x: x.view(-1, 2, 2)).tag("pairs").map(a).over("pairs")
    return flow, lambda x: torch.stack([a(b(x)[:, :2]), a(b(x)[:, 2:])], 1)


def map_slices() -> tuple[FlowBuilder, ByHand]:
    a = linear(2, 3)
    return FlowBuilder().map(a).slices(2), lambda x: torch.cat([a(x[:, :2]), a(x[:, 2:])], 1)


def map_slices_batched_using() -> tuple[FlowBuilder, ByHand]:
    a, first = TwoInputs(2), linear(4, 2)
    flow = FlowBuilder().fork(first).tag("context").map(a).batched().slices(2).using("context")
    return flow, lambda x: torch.cat([a(x[:, :2], first(x)), a(x[:, 2:], first(x))], 1)


def a_module_twice() -> tuple[FlowBuilder, ByHand]:
    a = linear()
    return FlowBuilder.from_(a).through(F.relu).through(a), lambda x: a(F.relu(a(x)))


def a_labelled_flow() -> tuple[FlowBuilder, ByHand]:
    a, b = linear(), linear()
    return FlowBuilder.from_(a).also(FlowBuilder("inner").through(b).through(F.relu)), lambda x: a(x) + F.relu(b(a(x)))


CASES = [
    *(through, also, also_with, also_a_flow, fork, split_add, split_mean, split_cat, split_function, split_tags),
    *(using_an_earlier_tag, also_using, loop_for, loop_using, loop_while_for_the_batch, loop_until_per_sample),
    *(
        map_each_from_behind,
        loop_until_per_sample_using,
        gate,
        gate_sigmoid,
        switch_per_sample,
        switch_by_integers,
        switch_for_the_batch,
        map_each,
        map_each_batched,
    ),
    *(map_over, map_slices, map_slices_batched_using, a_module_twice, a_labelled_flow),
]


@pytest.mark.parametrize("case", CASES)
def test_a_verb_equals_the_same_by_hand(case: Callable[[], tuple[FlowBuilder, ByHand]]) -> None:
    torch.manual_seed(3)
    flow, by_hand = case()
    x = torch.randn(6, 4, dtype=torch.float64)
    graph = flow.build().double()
    values, gradients = both(graph, graph, x)
    expected, by_hand_gradients = both(graph, by_hand, x)
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-14)
    assert values.abs().sum() > 0
    for mine, other in zip(gradients, by_hand_gradients, strict=True):
        assert (mine is None) == (other is None), "the same params take part"
        if mine is not None and other is not None:
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)
    dry = case()[0].build(torch.randn(6, 4))
    assert len(dry.shapes) == len(dry.plan.nodes), "a dry run sees every node"


def both(graph: Graph, function: ByHand, x: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    """Values and the gradients of the input and of every param."""
    x = x.clone().requires_grad_()
    graph.zero_grad()
    graph.reset_state()
    values = function(x)
    (values * torch.arange(1.0, 1 + values.numel()).view(values.shape)).sum().backward()
    return values.detach(), [x.grad, *(None if p.grad is None else p.grad.clone() for p in graph.parameters())]


def test_inputs_go_by_place_and_by_name() -> None:
    part = TwoInputs()
    graph = FlowBuilder().input("other").through(part).using("other").build(torch.ones(2, 4), torch.ones(2, 4))
    x, other = torch.randn(3, 4), torch.randn(3, 4)
    assert torch.equal(graph(x, other), part(x, other))
    assert torch.equal(graph(x, other=other), part(x, other))
    with pytest.raises(TypeError, match="other"):
        graph(x)


def test_outputs_are_the_stream_then_the_tags() -> None:
    a, b = nn.Linear(4, 4), nn.Linear(4, 2)
    graph = FlowBuilder.from_(a).fork(b).tag("aside").through(F.relu).build(torch.ones(2, 4), outputs=["aside"])
    x = torch.randn(3, 4)
    main, aside = graph(x)
    assert torch.equal(main, F.relu(a(x)))
    assert torch.equal(aside, b(a(x)))


@pytest.mark.parametrize(
    "flow",
    [
        lambda: FlowBuilder().switch(lambda x: (x[:, 0] > 0).long(), [linear(), linear()]),
        lambda: FlowBuilder().switch(linear(4, 2), [linear(), linear()]),
        lambda: FlowBuilder().loop(linear()).until(lambda x: x[:, 0] > 0, most=3),
        lambda: FlowBuilder().gate(linear(4, 2), [linear(), linear()]),
        lambda: FlowBuilder().map(linear(2, 2)).slices(2),
    ],
)
@pytest.mark.parametrize("samples", [0, 1])
def test_empty_batches_and_single_samples_pass(flow: Callable[[], FlowBuilder], samples: int) -> None:
    assert flow().build()(torch.randn(samples, 4)).shape == (samples, 4)


def test_samples_that_are_done_keep_their_gradient() -> None:
    x = torch.tensor([[2.0], [30.0]], requires_grad=True)
    graph = FlowBuilder().loop(lambda v: (v - 1).sqrt()).until(lambda v: v[:, 0] <= 1.0, most=2).build()
    graph(x).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_a_pass_of_some_samples_may_have_another_dtype_as_under_autocast_on_a_gpu() -> None:
    """The operations that CUDA's autocast promotes are without index_copy, those of a CPU's are with it."""
    x = torch.tensor([[1.0], [8.0], [3.0]], dtype=torch.float64, requires_grad=True)
    graph = FlowBuilder().loop(lambda x: (x / 2).float()).while_(lambda x: x[:, 0] > 2).build()
    result = graph(x)
    assert result.dtype == torch.float64
    assert result.flatten().tolist() == [1.0, 2.0, 1.5]
    result.sum().backward()
    assert x.grad is not None
    assert x.grad.flatten().tolist() == [1.0, 0.25, 0.5]
