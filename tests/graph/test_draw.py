"""Pictures of graphs: every node is in them, nothing overlaps, and nothing a name holds breaks the text."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from uneven.bench.models.resnet_graph import make_graph
from uneven.errors import InputError
from uneven.graph.drawing.draw import _Sketch
from uneven.graph.drawing.layout import arrange
from uneven.graph.drawing.scene import Box, Layout
from uneven.graph.drawing.svg import text_width
from uneven.graph.dryrun import dry_run
from uneven.graph.flow import FlowBuilder
from uneven.graph.graph import Graph
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


def long() -> Graph:
    flow = FlowBuilder("long")
    for _ in range(24):
        flow.also(nn.Linear(8, 8))
    for _ in range(50):
        flow.through(nn.ReLU())
    return flow.build()


@cache
def built(example: Callable[[], Graph]) -> Graph:
    return example()


@cache
def layout_of(example: Callable[[], Graph]) -> Layout:
    graph = built(example)
    return arrange(_Sketch(graph, None).scene(graph, is_whole=True))


EXAMPLES = [resnet, mixture, switch, loops, mapped, recurrent, split, fork, masked, long]
each_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.__name__)


def node_paths(graph: Graph) -> list[str]:
    """The paths of all nodes, as a profile names them."""
    graphs = [(path, module) for path, module in graph.named_modules() if isinstance(module, Graph)]
    return [f"{path}.{node.name}".removeprefix(".") for path, inner in graphs for node in inner.plan.nodes]


def titles(text: str) -> set[str]:
    """The first words of all tooltips; the tooltip of state across calls names both of its nodes."""
    texts = [element.text or "" for element in ET.fromstring(text).iter() if element.tag.endswith("}title")]
    return {
        name.removesuffix(": input")
        for title in texts
        for name in re.split(r", (?=\S+: the value of)", title.split("\n")[0])
    }


def layouts_in(layout: Layout) -> Iterator[Layout]:
    yield layout
    for box in layout.boxes:
        if box.inside is not None:
            yield from layouts_in(box.inside)


@each_example
def test_every_node_is_in_the_picture(example: Callable[[], Graph]) -> None:
    graph = built(example)
    drawn = {title.split(": the value of")[0] for title in titles(graph.draw())}
    assert sorted(set(node_paths(graph)) - drawn) == []


@each_example
def test_boxes_stand_apart_and_inside_their_frames(example: Callable[[], Graph]) -> None:
    for layout in layouts_in(layout_of(example)):
        for number, one in enumerate(layout.boxes):
            assert 0 <= one.x <= one.x + one.width <= layout.width + 0.01, one.item.name
            assert 0 <= one.y <= one.y + one.height <= layout.height + 0.01, one.item.name
            for other in layout.boxes[number + 1 :]:
                assert not crosses(one, other.x, other.y, other.x + other.width, other.y + other.height), (
                    f"{one.item.name} lies over {other.item.name}"
                )
            if one.inside is not None:
                assert one.inset + one.inside.width <= one.width + 0.01
                assert one.item.head + one.inside.height <= one.height + 0.01


@each_example
def test_no_line_runs_through_a_box_or_out_of_its_frame(example: Callable[[], Graph]) -> None:
    for layout in layouts_in(layout_of(example)):
        for line in layout.lines:
            for (x, y), (to_x, to_y) in pairwise(line.points):
                assert 0 <= x <= layout.width
                assert 0 <= y <= layout.height
                for box in layout.boxes:
                    is_end = box.item.name in (line.edge.source, line.edge.target)
                    inside = crosses(box, min(x, to_x), min(y, to_y), max(x, to_x), max(y, to_y), margin=0.5)
                    assert is_end or not inside, f"{line.edge} runs through {box.item.name}"


def crosses(box: Box, left: float, top: float, right: float, bottom: float, margin: float = 0.0) -> bool:
    is_beside = right <= box.x + margin or box.x + box.width - margin <= left
    return not is_beside and top < box.y + box.height - margin and box.y + margin < bottom


@each_example
def test_text_stays_within_its_card(example: Callable[[], Graph]) -> None:
    """By the estimate that is made for a wide font: what a row holds side by side is less than the card's width."""
    for group in ET.fromstring(built(example).draw()).iter("{http://www.w3.org/2000/svg}g"):
        rects = [child for child in group if child.get("class") == "card"]
        for row in [child for child in group if child.get("data-node")] if rects else []:
            spans = sorted(map(span, row.iter("{http://www.w3.org/2000/svg}text")))
            for (y, _, end), (next_y, start, _) in pairwise(spans):
                assert y != next_y or end <= start
            assert all(start >= 0 and end <= float(rects[0].get("width", 0)) for _, start, end in spans)


def span(text: ET.Element) -> tuple[float, float, float]:
    look = text.get("class", "").split()
    width = text_width(text.text or "", 10.5 if look else 11.5)
    x = float(text.get("x", 0)) - (width if "end" in look else 0.0)
    return float(text.get("y", 0)), x, x + width - 0.2


@each_example
def test_same_graph_same_bytes(example: Callable[[], Graph]) -> None:
    graph = built(example)
    assert graph.draw() == graph.draw() == example().draw()


@each_example
def test_dot_is_balanced_and_has_every_node(example: Callable[[], Graph], tmp_path: Path) -> None:
    graph = built(example)
    text = graph.draw(tmp_path / "graph.dot")
    assert (tmp_path / "graph.dot").read_text(encoding="utf-8") == text
    words = re.findall(r'"((?:[^"\\]|\\.)*)"', text)
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', "", text)
    assert bare.count("{") == bare.count("}") >= 1
    assert '"' not in bare
    names = {name for word in words for name in re.split(r"\\n|: |, ", word)}
    assert sorted(set(node_paths(graph)) - names) == []


def test_dot_edges_join_nodes_that_are_there(tmp_path: Path) -> None:
    for example in EXAMPLES:
        text = built(example).draw(tmp_path / "graph.dot")
        nodes = set(re.findall(r'^ *("[^"]*#\d+") \[', text, re.MULTILINE))
        ends = re.findall(r'^ *("[^"]*") -> ("[^"]*")', text, re.MULTILINE)
        assert ends
        assert {end for pair in ends for end in pair} <= nodes


def test_a_chain_is_one_card_and_a_branch_ends_it() -> None:
    flow = pair().through(nn.Tanh()).tag("out").through(nn.Linear(8, 8)).through(Taking()).using("out")
    boxes = {box.item.name: box.item.content.rows for box in layout_of(flow.build).boxes}
    assert [row.path for row in boxes["linear_1"]] == ["linear_1", "relu_1", "out"]
    assert [row.path for row in boxes["linear_2"]] == ["linear_2"]
    assert [row.path for row in boxes["taking_1"]] == ["taking_1"]


def test_an_identity_skip_is_a_line_and_not_a_card() -> None:
    layout = layout_of(FlowBuilder().also_with(nn.Identity(), nn.Linear(8, 8)).build)
    assert "identity_1" not in {box.item.name for box in layout.boxes}
    assert [line.edge.title for line in layout.lines if line.edge.kind == "skip"] == ["identity_1\nIdentity()"]


def test_state_across_calls_is_a_dashed_line_back() -> None:
    layout = layout_of(recurrent)
    backs = [line for line in layout.lines if line.edge.kind == "state"]
    assert [line.edge.label for line in backs] == ["h", "late", "late"]
    assert all(line.points[0][1] > line.points[-1][1] for line in backs)
    assert 'class="line state"' in built(recurrent).draw()


def test_a_loop_has_a_line_back_and_says_how_long() -> None:
    text = built(loops).draw()
    assert text.count('class="line again" d="M') == 4  # three loops and the legend
    for heading in ("loop until is_small, at most 100", "refined: loop while is_small, at most 100", "loop for 3"):
        assert f">{heading}</text>" in text


def test_long_graphs_go_on_in_further_columns() -> None:
    layout = layout_of(long)
    assert layout.height < 2000 < sum(box.height for box in layout.boxes)
    assert layout.width < 2 * layout.height


def test_resnet_fits_a_page_with_its_shapes() -> None:
    layout = layout_of(resnet)
    assert layout.width < 1200
    assert layout.height < 1700
    assert "\u00d716\u00d78\u00d78</text>" in built(resnet).draw()


def test_many_experts_alike_are_one_card() -> None:
    flow = FlowBuilder().gate(nn.Linear(8, 64), [nn.Linear(8, 8) for _ in range(64)])
    assert layout_of(flow.build).width < 600
    assert "expert 0-63" in flow.build().draw()


def profile_of(graph: Graph, hot: str) -> Profile:
    calls = [path for path in node_paths(graph) if not path.endswith("x")]
    inner = {path for path in calls if any(other.startswith(f"{path}.") for other in calls)}
    rows = [NodeProfile(path, "", 9.0 if path == hot else 1.0, 4000, 80, path in inner) for path in calls]
    return Profile(tuple(rows), 20.0)


def heat(text: str) -> dict[str, float]:
    """The opacity of the heat colour behind each node."""
    opacity = {}
    for group in ET.fromstring(text).iter("{http://www.w3.org/2000/svg}g"):
        for child in group:
            if group.get("data-node") and child.get("class") == "heat":
                opacity[group.get("data-node", "")] = float(child.get("fill-opacity", "nan"))
    return opacity


def test_heat_follows_the_profile() -> None:
    graph = FlowBuilder("model").through(pair().label("inner")).also(nn.Linear(8, 8)).build()
    profile = profile_of(graph, "inner.linear_1")
    text = graph.draw(profile=profile)
    warm = heat(text)
    assert warm["inner.linear_1"] == pytest.approx(9 * warm["inner.relu_1"], abs=0.01)
    assert warm["inner.relu_1"] == warm["add"] == warm["linear_1"] > 0
    assert set(heat(graph.draw()).values()) == {0.0}
    assert ">9.00</text>" in text
    assert ">10.0</text>" in text  # the frame: what its nodes take together
    assert "0 to 75.0 % of the 12 ms" in text
    title = "inner.linear_1\nLinear(in_features=8, out_features=8, bias=True)\n72 params\n9 ms, 75.0 % of the time\n"
    assert f"{title}value 4 kB, params 80 B" in text


def test_a_verb_of_plain_modules_has_its_heat_at_its_head() -> None:
    graph = FlowBuilder().gate(nn.Linear(8, 2), [nn.Linear(8, 8), nn.Tanh()]).build()
    assert '<path class="heat" fill-opacity="0.750"' in graph.draw(profile=profile_of(graph, "gate_1"))
    assert '<path class="heat"' not in graph.draw()


def test_a_profile_of_another_graph_is_refused() -> None:
    with pytest.raises(InputError, match=r"another graph.*gelu_1"):
        fork().draw(profile=profile_of(FlowBuilder.from_(nn.GELU()).build(), ""))


def strange(x: Tensor) -> Tensor:
    return x


strange.__name__ = '<b>&"\\\x07 {'


class Strange(nn.Module):
    def extra_repr(self) -> str:
        return '</title><&">'

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_nothing_in_a_name_breaks_the_text(tmp_path: Path) -> None:
    flow = FlowBuilder("inner").through(strange).through(Strange())
    graph = FlowBuilder("outer").through(flow).loop(strange).until(strange).build()
    root = ET.fromstring(graph.draw())
    texts = {element.text for element in root.iter() if element.tag.endswith("}text")}
    assert {"outer", "inner", '<b>&"\\? {', 'Strange </title><&">'} <= texts
    dot = graph.draw(tmp_path / "graph.dot")
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', "", dot)
    assert '"' not in bare
    assert bare.count("{") == bare.count("}")


def test_picture_stands_alone_and_knows_the_dark() -> None:
    text = built(mixture).draw()
    assert "prefers-color-scheme:dark" in text
    assert "<script" not in text
    assert text.count("http") == 1  # the name of SVG itself
    assert "url(#" in text
    assert text.count("url(") == text.count("url(#")


def test_path_decides_what_is_written(tmp_path: Path) -> None:
    graph = fork()
    assert graph.draw(tmp_path / "a.svg") == (tmp_path / "a.svg").read_text(encoding="utf-8") == graph.draw()
    for name in ("a.png", "a"):
        with pytest.raises(InputError, match=r"\.svg or in \.dot"):
            graph.draw(tmp_path / name)
    with pytest.raises(InputError, match="no folder"):
        graph.draw(tmp_path / "missing" / "a.svg")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.svg"]
