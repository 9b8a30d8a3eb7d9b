"""A graph is an ordinary module: copies, state dicts, torch.compile, autocast; and it knows its structure and paths."""

import copy
import functools
import inspect
import operator
import pickle
import traceback
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from tests.graph.nets import TwoInputs
from uneven.errors import InputError
from uneven.graph.flow import FlowBuilder
from uneven.graph.graph import Graph

X = torch.linspace(-1, 1, 12).view(3, 4)


def halves(x: Tensor) -> Tensor:
    return x / 2


def flow(activation: nn.Module | None = None) -> FlowBuilder:
    """All that a graph may hold, in plain sight: sub-graph, loop, gate, function, state across calls."""
    encoder = FlowBuilder("encoder").through(nn.Linear(4, 8)).tag("inner").through(activation or nn.ReLU())
    body = FlowBuilder.from_(nn.Linear(8, 8)).through(nn.Tanh())
    return (
        FlowBuilder("net")
        .through(encoder)
        .also(nn.Linear(8, 8))
        .loop(body)
        .for_n(2)
        .gate(nn.Linear(8, 2), [nn.Linear(8, 8), nn.Linear(8, 8)])
        .through(halves)
        .through(TwoInputs(8))
        .using("h")
        .tag("h")
        .through(nn.Linear(8, 3))
        .tag("scores")
    )


def make(activation: nn.Module | None = None) -> Graph:
    torch.manual_seed(1)
    return flow(activation).build(X)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda graph: pickle.loads(pickle.dumps(graph)), lambda g: cloudpickle.loads(cloudpickle.dumps(g))],
)
def test_copies_compute_the_same_and_are_independent(copied: object) -> None:
    graph = make()
    other = copied(graph)  # type: ignore[operator]
    assert torch.equal(graph(X), other(X))
    assert other.structural_hash == graph.structural_hash
    with torch.no_grad():
        next(other.parameters()).add_(1)
    graph.reset_state()
    other.reset_state()
    assert not torch.equal(graph(X), other(X))


def test_names_are_readable() -> None:
    assert list(make().state_dict())[:4] == [
        "encoder.inner.weight",
        "encoder.inner.bias",
        "linear_1.weight",
        "linear_1.bias",
    ]
    assert "loop_1.body.linear_1.weight" in make().state_dict()
    assert "scores.weight" in make().state_dict()


def test_an_ordinary_state_dict_goes_in_and_out() -> None:
    graph, other = make(), make()
    nn.init.zeros_(other.at("scores").weight)
    other.load_state_dict(graph.state_dict())
    assert torch.equal(graph(X), other(X))


def test_it_compiles_as_one_piece() -> None:
    """By dynamo and by AOTAutograd behind it; the test of many graphs has dynamo alone."""
    graph = make()
    expected = [graph(X), graph(X)]
    graph.reset_state()
    compiled = torch.compile(graph, backend="aot_eager", fullgraph=True)
    for value in expected:
        torch.testing.assert_close(compiled(X), value)


def test_autocast_reaches_the_parts() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert make()(X).dtype == torch.bfloat16


def test_a_part_put_in_place_of_another_is_used() -> None:
    graph = make()
    graph.scores = nn.Linear(8, 5)
    assert graph(X).shape == (3, 5)


def test_fx_sees_it() -> None:
    graph = make()
    as_fx = fx.GraphModule(graph, graph.fx)
    graph.reset_state()
    assert torch.equal(as_fx(X), _fresh(graph)(X))
    assert "self.encoder(x)" in graph.code


def _fresh(graph: Graph) -> Graph:
    graph.reset_state()
    return graph


def test_a_traceback_shows_the_line_of_the_graph() -> None:
    with pytest.raises(RuntimeError) as caught:
        make()(torch.ones(3, 5))
    assert "encoder = self.encoder(x)" in "".join(traceback.format_tb(caught.value.__traceback__))


def test_parts_are_found_frozen_and_thawed_by_path() -> None:
    graph = make()
    assert graph.at("encoder.inner") is graph.encoder.inner
    assert graph.parameters_at("encoder.inner") == list(graph.encoder.inner.parameters())
    graph.freeze("encoder")
    trained = {name for name, param in graph.named_parameters() if param.requires_grad}
    assert trained == {name for name, _ in graph.named_parameters() if not name.startswith("encoder.")}
    graph(X).sum().backward()
    assert graph.encoder.inner.weight.grad is None
    assert all(param.requires_grad for param in graph.thaw().parameters())
    with pytest.raises(InputError, match=r"no part 'encoder\.iner': did you mean encoder\.inner"):
        graph.freeze("encoder.iner")


def test_the_hash_is_of_the_structure_and_not_of_values() -> None:
    graph = make()
    torch.manual_seed(2)
    assert flow().build().structural_hash == graph.structural_hash
    assert make(nn.GELU()).structural_hash != graph.structural_hash
    twice = FlowBuilder.from_(nn.Linear(4, 4)).tag("a").through(nn.Linear(4, 4)).tag("b")
    turned = FlowBuilder.from_(nn.Linear(4, 4)).tag("b").through(nn.Linear(4, 4)).tag("a")
    assert twice.build().structural_hash != turned.build().structural_hash


def test_a_checkpoint_of_another_graph_is_refused_with_the_difference(tmp_path: Path) -> None:
    graph = make()
    graph.save(tmp_path / "net.safetensors")
    other = make()
    nn.init.zeros_(other.scores.weight)
    assert torch.equal(other.load(tmp_path / "net.safetensors")(X), graph(X))
    with pytest.raises(
        InputError, match=r"another graph:(.|\n)*-  relu_1 = relu_1: ReLU(.|\n)*\+  gelu_1 = gelu_1: GELU"
    ):
        make(nn.GELU()).load(tmp_path / "net.safetensors")
    with pytest.raises(InputError, match="there is no file"):
        graph.load(tmp_path / "none.safetensors")


def test_shared_params_are_saved_once(tmp_path: Path) -> None:
    def tied() -> Graph:
        shared = nn.Linear(4, 4)
        return (
            FlowBuilder.from_(shared).tag("first").through(F.relu).through(FlowBuilder("inner").through(shared)).build()
        )

    graph, other = tied(), tied()
    graph.save(tmp_path / "tied.safetensors")
    assert torch.equal(other.load(tmp_path / "tied.safetensors")(X), graph(X))


def test_a_profile_has_every_node_and_leaves_the_graph_alone() -> None:
    graph = FlowBuilder("net").through(nn.Linear(4, 8)).through(nn.BatchNorm1d(8)).tag("norm").loop(
        FlowBuilder.from_(nn.Linear(8, 8)).tag("again")
    ).for_n(3).build(X)  # fmt: skip
    profile = graph.profile(X, repeats=2)
    assert [row.path for row in profile.nodes] == ["linear_1", "norm", "loop_1", "loop_1.body.again"]
    assert profile["linear_1"].output_bytes == 3 * 8 * 4
    assert profile["linear_1"].param_bytes == (4 * 8 + 8) * 4
    assert profile["loop_1"].is_inner
    assert profile["loop_1"].ms >= profile["loop_1.body.again"].ms > 0
    loop = profile["loop_1"]
    assert loop.own_ms == pytest.approx(loop.ms - profile["loop_1.body.again"].ms)
    others = [row.ms for row in profile.nodes if not row.is_inner]
    assert profile.node_ms == pytest.approx(sum(others) + loop.own_ms)
    with pytest.raises(InputError, match="no node 'norm2'"):
        profile["norm2"]
    assert graph.norm.num_batches_tracked == 0
    assert "loop_1.body.again" in str(profile)


def test_the_summary_counts_params_and_shows_shapes() -> None:
    text = make().freeze("encoder").summary()
    params = sum(param.numel() for param in make().parameters())
    assert f"{params:,} params, {params - 40:,} of them trained" in text
    assert "encoder.inner" in text
    assert "loop_1.body.linear_1" in text
    assert "(3, 8)" in text
    experts = [FlowBuilder.from_(nn.Linear(4, 2)).tag("narrow"), FlowBuilder.from_(nn.Linear(4, 2)).tag("other")]
    both = FlowBuilder().gate(nn.Linear(4, 2), experts).build().summary()
    assert "gate_1.experts.0.narrow" in both
    assert "gate_1.experts.1.other" in both


def test_many_graphs_compile_each_for_itself() -> None:
    for many in range(1, 11):  # torch.compile gives up on one function after eight versions of it
        chain = FlowBuilder()
        for _ in range(many):
            chain.through(nn.Linear(4, 4))
        graph = chain.build()
        torch.testing.assert_close(torch.compile(graph, backend="eager", fullgraph=True)(X), graph(X))


def test_its_signature_is_that_of_its_inputs() -> None:
    graph = FlowBuilder().input("other").through(TwoInputs()).using("other").build()
    assert list(inspect.signature(graph.forward).parameters) == ["x", "other"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (nn.TransformerEncoderLayer(8, 2, norm_first=True), nn.TransformerEncoderLayer(8, 4, norm_first=False)),
        (operator.itemgetter(0), operator.itemgetter(1)),
        (functools.partial(torch.mul, other=2), functools.partial(torch.mul, other=3)),
        (lambda x: x + 1, lambda x: x - 1),
        (nn.Dropout(0.1), nn.Dropout(0.2)),
    ],
)
def test_parts_that_compute_something_else_make_another_structure(one: object, other: object) -> None:
    first, second = (FlowBuilder.from_(part).build().structural_hash for part in (one, other))  # type: ignore[arg-type]
    assert first != second
    assert FlowBuilder.from_(one).build().structural_hash == first  # type: ignore[arg-type]


def test_shared_params_and_starts_of_states_count_and_numbers_do_not() -> None:
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    tied = FlowBuilder().through(FlowBuilder("p").through(a)).through(FlowBuilder("q").through(a)).build()
    apart = FlowBuilder().through(FlowBuilder("p").through(a)).through(FlowBuilder("q").through(b)).build()
    assert tied.structural_hash != apart.structural_hash
    zeros = FlowBuilder.from_(TwoInputs()).using("h").tag("h").build(X)
    ones = FlowBuilder.from_(TwoInputs()).using("h", start=torch.ones_like).tag("h").build(X)
    assert zeros.structural_hash != ones.structural_hash
    before = zeros.structural_hash
    zeros(X)
    assert zeros.half().eval().structural_hash == before
    norm = FlowBuilder.from_(nn.BatchNorm1d(4)).build()
    before = norm.structural_hash
    assert nn.SyncBatchNorm.convert_sync_batchnorm(norm).structural_hash == before
    assert tied.at("q.linear_1") is a, "both names of a shared module lead to it"


def test_files_that_cannot_be_read_or_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.safetensors").write_bytes(b"12345678{")
    with pytest.raises(InputError, match="is not a safetensors file"):
        make().load(tmp_path / "broken.safetensors")
    with pytest.raises(InputError, match="cannot write"):
        make().save(tmp_path / "missing" / "net.safetensors")
