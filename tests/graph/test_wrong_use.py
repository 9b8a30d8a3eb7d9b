"""Mistakes are refused when the flow is described or built, with the node and the fix in the message."""

import functools
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from uneven.errors import InputError
from uneven.graph.flow import FlowBuilder


def start() -> FlowBuilder:
    return FlowBuilder.from_(nn.Linear(4, 8)).tag("hidden")


X = torch.ones(2, 4)
WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: FlowBuilder().build(), "the flow is empty"),
    (
        lambda: start().through(nn.ReLU),
        r"through.*a part must be a module, a function or a flow; make an instance: ReLU\(\.\.\.\)",
    ),
    (lambda: start().through(3), "through.3.: a part must be"),
    (
        lambda: start().through(nn.Linear(7, 2)).build(X),
        r"node 'linear_1' \(Linear 7 to 2\) cannot take 'hidden' \(2, 8\)",
    ),
    (lambda: start().also(nn.Linear(8, 4)).build(X), r"node 'add'.*also_with\(skip, part\)"),
    (lambda: start().also_with(nn.Linear(8, 3), nn.Linear(8, 4)).build(X), r"node 'add'.*\(2, 3\).*\(2, 4\)"),
    (lambda: start().fork(nn.Linear(8, 1)).build(X), r"the branch 'linear_1' .*is not used: tag it.*using\('aside'\)"),
    (lambda: start().fork(F.relu).tag("side").build(), r"the branch 'side' .*is not used.*outputs=\['side'\]"),
    (
        lambda: start().split([nn.ReLU()]).through(nn.ReLU()),
        r"split.*not complete when \.through follows.*merge\('add'\)",
    ),
    (lambda: start().split([]), r"split takes a list of parts"),
    (lambda: start().split([F.relu, F.gelu]).tag("one"), "1 tags for 2 branches"),
    (lambda: start().split([F.relu, F.gelu]).merge("sum"), r"merge\('sum'\) must be one of add, mean, cat"),
    (
        lambda: start().split([nn.Linear(8, 1), nn.Linear(8, 2), nn.Linear(8, 3)]).merge("add").build(torch.ones(3, 4)),
        r"node 'add'.*Branches to merge need one shape",
    ),
    (lambda: FlowBuilder().tag("early"), "comes before the first part"),
    (lambda: start().tag("a.b"), "a name consists of letters"),
    (lambda: start().tag('a"b'), "a name consists of letters"),
    (lambda: FlowBuilder("two words"), "a name consists of letters"),
    (lambda: start().tag("pass"), "is not a Python keyword"),
    (lambda: start().tag("self"), "a graph has an attribute of this name"),
    (lambda: start().tag("forward"), "a graph has an attribute of this name"),
    (lambda: start().tag("draw"), "a graph has an attribute of this name"),
    (lambda: start().through(F.relu).tag("hidden").build(), r"'hidden' is used twice|two parts have the name 'hidden'"),
    (lambda: start().through(F.relu).using("hiden").build(), r"unknown tag 'hiden': did you mean 'hidden'\?"),
    (lambda: FlowBuilder().using("x1"), "must follow a part"),
    (lambda: start().build(outputs=["scores"]), "unknown tag 'scores'"),
    (lambda: start().input("mask").build(), r"the input 'mask' is not used.*\.using\('mask'\)"),
    (lambda: start().input("not a name"), "must be a new identifier"),
    (lambda: start().input("mask").input("mask"), "must be a new identifier"),
    (lambda: start().input("mask").through(F.relu).tag("mask").using("mask").build(), "also the name of an input"),
    (lambda: start().loop(nn.Linear(8, 8)).through(F.relu), r"loop\(body\) is not complete.*for_n\(n\)"),
    (lambda: start().loop(nn.Linear(8, 8)).for_n(0), r"for_n\(0\) must be an integer of at least 1"),
    (lambda: start().loop(nn.Linear(8, 8)).until(lambda x: x.sum(1)).build(X), "condition must return one bool"),
    (lambda: start().loop(nn.Linear(8, 7)).for_n(2).build(X), "node 'loop_1'"),
    (lambda: start().gate(nn.Linear(8, 3), [F.relu, F.gelu]).build(X), "3 scores for 2 experts"),
    (lambda: start().gate(nn.Linear(8, 2), [F.relu, F.gelu], weighting="max"), "must be one of softmax, sigmoid, none"),
    (lambda: start().gate(nn.Linear(8, 2), []), "gate takes a list of parts"),
    (lambda: start().switch(lambda x: 2, [F.relu, F.gelu]).build(X), "chose branch 2 of 2"),
    (lambda: start().switch(nn.Linear(8, 3), [F.relu, F.gelu]).build(X), r"scores have shape \(2, 3\)"),
    (lambda: start().switch(lambda x: x[:, :1].long(), [F.relu]).build(X), "not for each of 2 samples"),
    (lambda: start().map(F.relu).through(F.relu), r"map\(body\) is not complete.*slices\(n\)"),
    (lambda: start().map(F.relu).each(0).build(X), "0 is the batch"),
    (lambda: start().map(F.relu).slices(3).build(X), "8 elements, which 3 slices do not divide"),
    (lambda: start().map(F.relu).over("tokens").build(), "unknown tag 'tokens'"),
    (lambda: FlowBuilder("a.b"), "a name consists of letters"),
    (lambda: FlowBuilder(0), "a name consists of letters"),
    (lambda: start().input("getattr"), "must be a new identifier.* not 'torch' or 'getattr'"),
    (lambda: start().build(outputs=3), "must be a list of tags"),
    (lambda: start().build(outputs=[3]), "must be a list of tags"),
    (lambda: start().split([F.relu, F.gelu]).merge("add", dim=2), "dim=2.*belongs to 'cat'"),
    (lambda: start().split([F.relu, F.gelu]).merge(torch.mul, dim=1), "dim=1.*belongs to 'cat'"),
    (lambda: start().split([F.relu, F.gelu]).merge("cat", dim="rows"), "dim='rows'.*must be an integer"),
    (lambda: start().split([F.relu, F.gelu]).merge(nn.Bilinear), r"make an instance: Bilinear\(\.\.\.\)"),
    (lambda: start().split([F.relu, F.gelu]).merge(nn.Bilinear(8, 8, 2).forward), "hides its params"),
    (lambda: start().map(F.relu).each(1.0), "dim=1.0.*must be an integer"),
    (lambda: start().through(torch.add).using("h", start=3), "start=3.*must be a function"),
    (lambda: start().through(torch.add).using("h", detach="no"), "detach='no'.*must be True or False"),
    (
        lambda: start().through(F.relu).through(torch.add).using("hidden", start=torch.ones_like).build(),
        "'hidden'.*has start or detach.*same call",
    ),
    (lambda: start().through(torch.add).using("hidden", detach=False).build(), "has start or detach.*same call"),
    (lambda: start().loop(nn.Linear(8, 8)).until(lambda x: [False] * len(x)).build(X), r"it returned \[False, False\]"),
    (lambda: start().loop(nn.Linear(8, 8)).while_(lambda x: None).build(X), "condition.*it returned None"),
    (lambda: start().switch(lambda x: 0.7, [F.relu, F.gelu]).build(X), "the selector chose 0.7: it must return an int"),
    (lambda: start().switch(lambda x: x.mean().sigmoid(), [F.relu, F.gelu]).build(X), "the selector chose tensor"),
    (lambda: start().switch(lambda x: [0, 1], [F.relu, F.gelu]).build(X), r"the selector chose \[0, 1\]"),
    (
        lambda: (
            start().through(FlowBuilder("part").through(F.relu)).through(FlowBuilder("part").through(F.gelu)).build()
        ),
        "two parts have the name 'part'",
    ),
    (
        lambda: start().through(FlowBuilder().input("m").through(torch.mul).using("m")).build(),
        "needs a label",
    ),
    (
        lambda: (
            FlowBuilder()
            .also_with(FlowBuilder.from_(nn.Linear(4, 4)).tag("s"), FlowBuilder.from_(torch.add).using("s"))
            .build()
        ),
        r"using\('s'\): the tag is set in the skip",
    ),
    (lambda: start().map(F.relu).over("late").through(F.relu).tag("late").build(), "'late' is set only later"),
    (
        lambda: start().through(FlowBuilder("sub").input("m").through(torch.mul).using("m")).build(),
        "'sub' takes 1 extra",
    ),
    (
        lambda: start().through(FlowBuilder("sub").through(F.relu).using("mask")).build(),
        "in the flow 'sub': unknown tag 'mask'",
    ),
    (lambda: start().build(outputs="hidden"), r"must be a list of tags, as in outputs=\['hidden'\]"),
    (lambda: start().through(nn.Linear(8, 8).forward), "a method of Linear hides its params"),
    (
        lambda: start().also(nn.ReLU(inplace=True)).build(X),
        r"changes 'hidden' in place, which 'add' also reads.*inplace=False",
    ),
    (lambda: FlowBuilder.from_(nn.ReLU(inplace=True)).build(X), "changes 'x' in place"),
    (lambda: FlowBuilder.from_(nn.LSTM(4, 4)).through(nn.Linear(4, 2)).build(torch.ones(3, 2, 4)), "itemgetter"),
    (lambda: start().input("torch"), "must be a new identifier"),
    (lambda: start().input("type"), "a graph has an attribute of this name"),
    (lambda: start().tag("_run"), "a name consists of letters"),
    (
        lambda: start().through(torch.add).using("h").tag("h").fork(torch.add).using("h").build(),
        "the branch .* is not used",
    ),
    (
        lambda: (
            start().switch(lambda x: x[:, 0].long() * 0, [torch.add]).using("w").input("w").build(X, torch.ones(3, 8))
        ),
        "it must have a row per sample",
    ),
    (lambda: start().build(X, X), "the example has 2 inputs, the graph 1"),
    (lambda: start().through(start().split([F.relu])), r"incomplete split"),
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_a_mistake_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_a_mistake_inside_a_sub_graph_is_reported_with_its_path() -> None:
    inner = FlowBuilder("inner").through(nn.Linear(8, 8)).through(nn.Linear(9, 2)).tag("scores")
    with pytest.raises(InputError, match=r"node 'inner\.scores' \(Linear 9 to 2\) cannot take 'linear_1' \(2, 8\)"):
        start().through(inner).build(X)


def test_a_sum_that_would_broadcast_is_refused() -> None:
    with pytest.raises(InputError, match=r"node 'add' \(add\) cannot take 'hidden' \(2, 8\), 'linear_1' \(2, 1\)"):
        start().also(nn.Linear(8, 1)).build(X)


def test_a_dry_run_leaves_nothing_behind() -> None:
    norm = nn.BatchNorm1d(8)
    flow = start().through(norm).through(nn.Dropout())
    before = torch.random.get_rng_state()
    graph = flow.build(X)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert graph.training
    assert norm.training
    assert norm.num_batches_tracked == 0
    assert torch.equal(norm.running_mean, torch.zeros(8))


def test_one_state_has_one_start() -> None:
    flow = start().through(torch.add).using("h").through(torch.add).using("h", start=torch.ones_like).tag("h")
    with pytest.raises(InputError, match="the state 'h' is used twice with different start"):
        flow.build()


def test_a_flow_is_complete_once_it_is_placed() -> None:
    inner = FlowBuilder.from_(nn.Linear(8, 8))
    start().loop(inner).for_n(2)
    late = [
        lambda: inner.through(nn.ReLU()),
        lambda: inner.tag("late"),
        lambda: inner.using("late"),
        lambda: inner.input("late"),
        lambda: inner.label("late"),
        lambda: inner.split([F.relu, F.gelu]).merge("add"),
    ]
    for verb in late:
        with pytest.raises(InputError, match="complete it first"):
            verb()
    own = FlowBuilder.from_(nn.ReLU())
    with pytest.raises(InputError, match="complete it first"):
        own.through(own)


def test_the_example_is_left_alone_and_no_gpu_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_: pytest.fail("a GPU was opened"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    x = torch.linspace(-1, 1, 8).view(2, 4)
    start().through(nn.ReLU(inplace=True)).build(x)
    assert torch.equal(x, torch.linspace(-1, 1, 8).view(2, 4))


HEAD = nn.Linear(8, 2)
norm = nn.LayerNorm(8)  # has the name of a method of tensors


def test_a_function_that_brings_params_along_is_refused_because_nobody_would_train_them() -> None:
    inner = nn.Linear(8, 2)
    hidden: list[Callable[..., object]] = [
        lambda x: inner(x)[:, :1],
        lambda x: HEAD(x).relu(),
        functools.partial(nn.Bilinear(8, 8, 2), torch.ones(2, 8)),
        functools.partial(F.linear, weight=torch.ones(2, 8), bias=None),
        lambda x: x.norm(dim=1, keepdim=True),  # an attribute, not the module of that name
    ]
    for part, is_refused in zip(hidden, (True, True, True, False, False), strict=True):
        for flow in (start().through(part), FlowBuilder("outer").through(start().label("inner").through(part))):
            with pytest.raises(InputError, match="whose params would not be trained") if is_refused else nullcontext():
                flow.build()
    with pytest.raises(InputError, match=r"'inner'.*Linear"):
        start().split([F.relu, F.gelu]).merge(lambda a, b: inner(a + b)).build()


def test_a_function_may_use_a_part_of_its_graph_or_frozen_params() -> None:
    words = nn.Embedding(5, 8)
    tied = FlowBuilder.from_(words).through(lambda x: F.linear(x, words.weight)).build(torch.tensor([1, 2]))
    assert list(tied.state_dict()) == ["embedding_1.weight"]
    teacher = nn.Linear(8, 8).requires_grad_(False)
    assert start().through(lambda x: teacher(x)).build(X)(X).shape == (2, 8)
