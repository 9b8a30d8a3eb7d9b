"""Pictures of graphs: every node is in them, lines join shapes that are there, no name breaks the text."""

import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from uneven.bench.models.resnet_graph import make_graph
from uneven.errors import InputError, MachineError
from uneven.graph.flow import FlowBuilder
from uneven.graph.graph import Graph
from uneven.graph.observe import dry_run
from uneven.graph.profile import NodeProfile, Profile


class Taking(nn.Module):
    """Takes the stream and further values."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(8, 8)

    def forward(self, x: Tensor, *further: Tensor) -> Tensor:
        return self.own(x) + sum(further)


def by_sign(x: Tensor) -> Tensor:
    return (x.sum(1) > 0).long()


def is_small(x: Tensor) -> Tensor:
    return x.norm(dim=1) < 1


def pair() -> FlowBuilder:
    return FlowBuilder.from_(nn.Linear(8, 8)).through(nn.ReLU())


def resnet() -> Graph:
    graph = make_graph()
    dry_run(graph, (torch.zeros(1, 3, 8, 8),))
    return graph


def mixture() -> Graph:
    experts = [pair().label("wide"), nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())]
    return FlowBuilder("mixture").gate(nn.Linear(8, 3), experts).through(nn.Linear(8, 4)).tag("head").build()


def switch() -> Graph:
    return FlowBuilder().switch(by_sign, [nn.Linear(8, 8), pair()]).through(nn.LayerNorm(8)).build()


def loops() -> Graph:
    flow = FlowBuilder("loops").loop(pair().also(nn.Linear(8, 8))).until(is_small)
    return flow.loop(pair()).while_(is_small).tag("refined").loop(pair().label("cell")).for_n(3).build()


def mapped() -> Graph:
    return FlowBuilder().map(pair()).each().map(nn.Linear(4, 4)).batched().slices(2).build(torch.zeros(2, 3, 8))


def recurrent() -> Graph:
    flow = FlowBuilder().through(nn.Linear(8, 8)).through(Taking()).using("h").through(nn.LayerNorm(8)).tag("h")
    flow.split([FlowBuilder.from_(Taking()).using("late"), nn.Linear(8, 8)]).merge("add")
    return flow.through(Taking()).using("late").tag("late").build(torch.zeros(2, 8))


def split() -> Graph:
    flow = FlowBuilder("inception").split([nn.Linear(8, 8), pair(), nn.Identity()]).tag("a", "b", "c").merge("cat")
    return flow.through(nn.Linear(24, 8)).split([pair(), nn.Tanh()]).merge("mean").build(torch.zeros(2, 8))


def fork() -> Graph:
    flow = FlowBuilder().through(nn.Linear(8, 8)).tag("hidden").fork(pair()).tag("value").through(nn.Linear(8, 4))
    return flow.build(torch.zeros(2, 8), outputs=["value", "hidden"])


def masked() -> Graph:
    layer = FlowBuilder("layer").input("mask").also(Taking()).using("mask")
    flow = FlowBuilder().input("mask").through(Taking()).using("mask").tag("first").through(layer).using("mask")
    return flow.also_with(nn.Linear(8, 8), pair()).through(Taking()).using("first", "mask").build()


@cache
def built(example: Callable[[], Graph]) -> Graph:
    return example()


EXAMPLES = [resnet, mixture, switch, loops, mapped, recurrent, split, fork, masked]
each_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.__name__)


def dot_of(graph: Graph, folder: Path, profile: Profile | None = None) -> str:
    return graph.draw(folder / "graph.dot", profile=profile)


def node_paths(graph: Graph) -> list[str]:
    """The paths of all nodes, as a profile names them."""
    graphs = [(path, module) for path, module in graph.named_modules() if isinstance(module, Graph)]
    return [f"{path}.{node.name}".removeprefix(".") for path, inner in graphs for node in inner.plan.nodes]


def check_balance(dot: str) -> None:
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', "", dot)
    assert '"' not in bare
    assert bare.count("{") == bare.count("}") >= 1
    assert bare.count("[") == bare.count("]") >= 1


@each_example
def test_every_node_is_in_the_dot_text(example: Callable[[], Graph], tmp_path: Path) -> None:
    graph = built(example)
    dot = dot_of(graph, tmp_path)
    assert (tmp_path / "graph.dot").read_text(encoding="utf-8") == dot
    check_balance(dot)
    words = re.findall(r'"((?:[^"\\]|\\.)*)"', dot)
    names = {name for word in words for name in re.split(r"\\n|: |, ", word)}
    assert sorted(set(node_paths(graph)) - names) == []


@each_example
def test_lines_join_shapes_that_are_there_in_both_languages(example: Callable[[], Graph], tmp_path: Path) -> None:
    graph = built(example)
    dot, mermaid = dot_of(graph, tmp_path), graph.draw()
    shapes = re.findall(r"^ *(n\d+) \[", dot, re.MULTILINE)
    lines = re.findall(r"^ *(n\d+) -> (n\d+) ", dot, re.MULTILINE)
    assert len(set(shapes)) == len(shapes)
    assert {end for line in lines for end in line} <= set(shapes)
    assert re.findall(r'^ *(n\d+)[\[(]+"', mermaid, re.MULTILINE) == shapes
    assert re.findall(r"^ *(n\d+) [-.=]+>\S* (n\d+)$", re.sub(r'\|"[^"]*"\|', "", mermaid), re.MULTILINE) == lines
    assert len(re.findall(r"^ *end$", mermaid, re.MULTILINE)) == dot.count("subgraph cluster")


@each_example
def test_every_input_reaches_every_output(example: Callable[[], Graph], tmp_path: Path) -> None:
    dot = dot_of(built(example), tmp_path)
    lines = re.findall(r"^ *(n\d+) -> (n\d+) \[([^\]]*)", dot, re.MULTILINE)
    inputs = re.findall(r"(n\d+) \[shape=ellipse label=\"input", dot)
    outputs = set(re.findall(r"(n\d+) \[shape=ellipse label=\"output", dot))
    for start in inputs:
        reached = {start}
        while more := {target for source, target, _ in lines if source in reached} - reached:
            reached |= more
        assert outputs <= reached


@each_example
def test_same_graph_same_bytes(example: Callable[[], Graph], tmp_path: Path) -> None:
    graph = built(example)
    assert graph.draw() == graph.draw() == example().draw()
    assert dot_of(graph, tmp_path) == dot_of(example(), tmp_path)


def lines_of(example: Callable[[], Graph], folder: Path, attribute: str) -> list[str]:
    dot = dot_of(built(example), folder)
    return re.findall(rf"^ *n\d+ -> n\d+ \[({attribute}[^\]]*)\]", dot, re.MULTILINE)


def test_state_across_calls_is_a_dashed_line_with_its_tag(tmp_path: Path) -> None:
    labels = [re.findall(r'label="(\w+)"', line) for line in lines_of(recurrent, tmp_path, "style=dashed")]
    assert labels == [["h"], ["late"], ["late"]]
    assert built(recurrent).draw().count("-.->") == 3


def test_a_loop_has_a_line_back_and_says_how_long(tmp_path: Path) -> None:
    assert len(lines_of(loops, tmp_path, "constraint=false")) == 3
    assert built(loops).draw().count("==>") == 3
    for heading in ("loop until is_small, at most 100", "refined: loop while is_small, at most 100", "loop for 3"):
        assert f'label="{heading}"' in dot_of(built(loops), tmp_path)
        assert f'"{heading}"' in built(loops).draw()


def test_extra_inputs_a_gates_weights_and_a_maps_count_are_shown(tmp_path: Path) -> None:
    assert len(lines_of(masked, tmp_path, "color=purple")) == 5  # one each into three, two into the last
    assert 'label="weights"' in dot_of(built(mixture), tmp_path)
    assert "map each of dimension 1" in built(mapped).draw()
    assert "map 2 slices of dimension -1, batched" in built(mapped).draw()
    assert "2\u00d73\u00d78" in built(mapped).draw()


def test_many_experts_alike_are_one_shape() -> None:
    text = FlowBuilder().gate(nn.Linear(8, 64), [nn.Linear(8, 8) for _ in range(64)]).build().draw()
    assert "expert 0-63" in text
    assert text.count("expert") == 1


def profile_of(graph: Graph, hot: str) -> Profile:
    calls = [path for path in node_paths(graph) if not path.endswith("x")]
    inner = {path for path in calls if any(other.startswith(f"{path}.") for other in calls)}
    rows = [NodeProfile(path, "", 9.0 if path == hot else 1.0, 4000, 80, path in inner) for path in calls]
    return Profile(tuple(rows), 20.0)


def test_times_and_colours_follow_the_profile(tmp_path: Path) -> None:
    graph = FlowBuilder("model").through(pair().label("inner")).also(nn.Linear(8, 8)).build()
    profile = profile_of(graph, "inner.linear_1")
    dot = dot_of(graph, tmp_path, profile)
    heat = dict(re.findall(r'tooltip="([\w.]+)\\n.*fillcolor="#f0680f(\w\w)"', dot))
    assert int(heat["inner.linear_1"], 16) == pytest.approx(9 * int(heat["inner.relu_1"], 16), abs=5)
    assert heat["inner.relu_1"] == heat["add"] == heat["linear_1"] != "00"
    assert "#f0680f" not in dot_of(graph, tmp_path)
    assert "9.00 ms" in dot
    assert 'label="inner 10.0 ms"' in dot  # the frame: what its nodes take together
    assert "darkest: 75.0 % of the 12 ms" in dot
    details = r"72 params\n9 ms, 75.0 % of the time\nvalue 4.0 kB, params 0.1 kB"
    assert rf"inner.linear_1\nLinear(in_features=8, out_features=8, bias=True)\n{details}" in dot
    assert graph.draw(profile=profile).count("fill:#f0680f") == len(heat)


def test_a_profile_of_another_graph_is_refused() -> None:
    with pytest.raises(InputError, match=r"another graph.*gelu_1"):
        fork().draw(profile=profile_of(FlowBuilder.from_(nn.GELU()).build(), ""))


def strange(x: Tensor) -> Tensor:
    return x


strange.__name__ = '<b>&"\\\x07 {#;'


class Strange(nn.Module):
    def extra_repr(self) -> str:
        return '</title><&">'

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_nothing_in_a_name_breaks_the_text(tmp_path: Path) -> None:
    flow = FlowBuilder("inner").through(strange).through(Strange())
    graph = FlowBuilder("outer").through(flow).loop(strange).until(strange).build()
    dot = dot_of(graph, tmp_path)
    check_balance(dot)
    assert "\x07" not in dot
    mermaid = graph.draw()
    texts = re.findall(r'"[^"\n]*"', mermaid)
    assert '"Strange &lt;/title&gt;&lt;&amp;#quot;&gt;"' in texts
    assert not re.search('["\x07<{\\\\]', re.sub(r'"[^"\n]*"', "", mermaid))


def test_the_end_of_the_path_decides_what_is_written(tmp_path: Path) -> None:
    graph = fork()
    assert graph.draw(tmp_path / "a.mmd") == (tmp_path / "a.mmd").read_text(encoding="utf-8") == graph.draw()
    assert graph.draw().split("\n")[3] == "flowchart TD"
    for name in ("a.png", "a"):
        with pytest.raises(InputError, match=r"\.svg, \.dot or \.mmd"):
            graph.draw(tmp_path / name)
    with pytest.raises(InputError, match="no folder"):
        graph.draw(tmp_path / "missing" / "a.svg")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.mmd"]


def test_an_svg_is_made_by_graphviz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "dot"
    program.parent.mkdir()
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    program.write_text('#!/bin/sh\necho "<svg $1>"; cat\n')
    program.chmod(0o755)
    text = fork().draw(tmp_path / "a.svg")
    assert text == "<svg -Tsvg>\n" + dot_of(fork(), tmp_path)
    assert (tmp_path / "a.svg").read_text(encoding="utf-8") == text
    program.write_text('#!/bin/sh\ncat > /dev/null; echo "no\nmemory" >&2; exit 3\n')
    with pytest.raises(MachineError, match="no memory"):
        fork().draw(tmp_path / "b.svg")
    program.unlink()
    monkeypatch.setenv("PATH", str(program.parent))
    with pytest.raises(MachineError, match="install the package graphviz"):
        fork().draw(tmp_path / "b.svg")
    assert not (tmp_path / "b.svg").exists()


@pytest.mark.skipif(shutil.which("dot") is None, reason="the picture needs Graphviz's dot")
@each_example
def test_graphviz_takes_every_example(example: Callable[[], Graph], tmp_path: Path) -> None:
    text = built(example).draw(tmp_path / "graph.svg")
    assert text.count("<title>cluster_") == dot_of(built(example), tmp_path).count("subgraph cluster_")
