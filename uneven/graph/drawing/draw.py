"""The items and edges of a graph's drawing; layout.py places them, svg.py and dot.py write them.

A chain of nodes is one card with a row per node, a merge is a ring, and a sub-graph or a module with control flow is a
frame around its parts.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from textwrap import wrap

from torch import nn

from uneven.errors import InputError
from uneven.graph.control_flow import Gate, Loop, Map, Switch
from uneven.graph.describe import count, in_bytes, is_inner, short
from uneven.graph.drawing.dot import to_dot
from uneven.graph.drawing.layout import arrange
from uneven.graph.drawing.scene import Edge, EdgeKind, Item, Scene
from uneven.graph.drawing.svg import (
    SMALL,
    Look,
    RowText,
    Sheet,
    card,
    cut,
    dot,
    frame,
    pill,
    port,
    ring,
    text_width,
    to_svg,
)
from uneven.graph.function import Function
from uneven.graph.plan import ENTRY, Node, PlanModule
from uneven.graph.profile import Profile

MAX_ROWS = 24  # of a card; a longer chain continues in another card
MAX_LINES = 8  # of a Sequential in its row
MAX_ALIKE = 4  # more equal experts in a row are drawn as one
EXIT = "out.0"  # the dot prevents a clash with names of nodes, which have none


def draw(graph: PlanModule, path: Path | None, profile: Profile | None) -> str:
    """The text of the drawing, written to the path if there is one."""
    suffix = ".svg" if path is None else path.suffix.lower()
    if suffix not in (".svg", ".dot"):
        raise InputError(f"draw({str(path)!r}): the file name must end in .svg or in .dot")
    if path is not None and not path.parent.is_dir():
        raise InputError(f"draw({str(path)!r}): there is no folder {str(path.parent)!r}; make it first")
    sketch = _Sketch(graph, profile)
    scene = sketch.scene(graph, is_whole=True)
    text = to_svg(arrange(scene), sketch.sheet()) if suffix == ".svg" else to_dot(scene, sketch.sheet())
    if path is not None:
        path.write_text(text, encoding="utf-8", newline="\n")
    return text


class _Wires:
    """The users of every node's value, as a drawing shows them.

    An Identity that leads into a merge is drawn as a plain line, not as a node. State across calls is drawn as a line
    from the value to its user.
    """

    def __init__(self, graph: PlanModule) -> None:
        self.plan = graph.plan
        self.users: dict[str, list[str]] = defaultdict(list)
        self.remembered = {node.target: node.sources[1] for node in self.plan.nodes if node.kind == "remember"}
        for node in self.plan.nodes:
            if node.kind not in ("recall", "remember"):
                for source in node.sources:
                    self.users[source].append(node.name)
        for name in self.plan.outputs:
            self.users[name].append("")
        self.hidden = {node.name: node.sources[0] for node in self.plan.nodes if self._is_plain_skip(graph, node)}
        self.trunk = self._trunk()

    def _is_plain_skip(self, graph: PlanModule, node: Node) -> bool:
        if node.kind != "call" or type(graph.get_submodule(node.target)) is not nn.Identity or len(node.sources) != 1:
            return False
        kinds = [name and self.plan.node(name).kind for name in self.users[node.name]]
        return len(kinds) == 1 and kinds[0] in ("add", "mean", "cat") and node.name not in self.remembered.values()

    def _trunk(self) -> set[str]:
        """The nodes of the stream from its end back to the input, without skips and forks."""
        trunk = {self.plan.outputs[0]}
        for node in reversed(self.plan.nodes):
            if node.name in trunk:
                trunk.update(_main_sources(node))
        return trunk

    def kind(self, node: Node, place: int, source: str) -> EdgeKind:
        if node.kind == "call" and node.verb != "merge" and place > 0:
            return "further"
        if node.name not in self.trunk:
            return "aside"
        return "stream" if source in _main_sources(node) else "skip"

    def is_chained(self, node: Node) -> bool:
        """Whether a node has a single source of which it is the only user."""
        source = node.sources[0]
        return len(node.sources) == 1 and self.users[source] == [node.name] and source not in self.remembered.values()


def _main_sources(node: Node) -> tuple[str, ...]:
    """The sources that carry the stream: all sources of a merge, one of any other node."""
    if node.verb == "merge":
        return node.sources
    return node.sources[-1:] if node.kind == "add" else node.sources[:1]


class _Sketch:
    """Makes the scenes of a graph and of the graphs inside it, with paths, shapes and times."""

    def __init__(self, root: PlanModule, profile: Profile | None) -> None:
        self._root, self._profile = root, profile
        self._prefix = {id(module): f"{path}." if path else "" for path, module in root.named_modules()}
        self._times = {row.path: row for row in profile.nodes} if profile else {}
        graphs = [module for module in root.modules() if isinstance(module, PlanModule)]
        known = {self._prefix[id(graph)] + node.name for graph in graphs for node in graph.plan.nodes}
        if unknown := next((path for path in self._times if path not in known), None):
            raise InputError(f"draw(profile=...): the profile is of another graph: this one has no node {unknown!r}")
        shares = [profile.share(row) for row in profile.nodes if not row.is_inner] if profile else []
        self._hottest = max(shares, default=0.0)

    def sheet(self) -> Sheet:
        many = count(self._root)
        subtitle = f"{many:,} params" + ("; shapes are those of the example" if self._root.shapes else "")
        title = cut(self._root.plan.label or "graph", 80)
        if self._profile is None:
            return Sheet(title, subtitle)
        legend = f"of the {self._profile.node_ms:.3g} ms that all nodes take; the numbers at the rows are ms"
        return Sheet(title, subtitle, legend, self._hottest)

    def scene(self, graph: PlanModule, is_whole: bool = False) -> Scene:
        """The nodes of one graph. Inputs and outputs are pills in the whole graph, and ports at the frame of a part."""
        plan, wires, prefix = graph.plan, _Wires(graph), self._prefix[id(graph)]
        groups = list(_groups(graph, wires))
        owner = {node.name: group[0].name for group in groups for node in group}
        items = [self._item(graph, group, is_whole) for group in groups]
        edges = [edge for group in groups for edge in _edges(wires, group[0], owner, prefix)]
        exits = tuple(f"out.{number}" for number in range(len(plan.outputs) if is_whole else 1))
        for number, name in enumerate(plan.outputs):
            edges.append(Edge(owner[name], exits[number * is_whole], "aside" if number else "stream"))
            tags = " ".join(plan.tags_of(name)) if number else ""
            row = RowText("", (cut(f"output {tags}".strip(), 40),), shape=_shape(graph, name), title=prefix + name)
            items.extend([pill(exits[number], row)] if is_whole else [port(EXIT)] * (not number))
        return Scene(tuple(items), tuple(dict.fromkeys(edges)), plan.inputs, exits)

    def _item(self, graph: PlanModule, group: list[Node], is_whole: bool) -> Item:
        """A chain of nodes as a card, or a single node as a port, pill, ring or frame."""
        node = group[0]
        path, shape = self._prefix[id(graph)] + node.name, _shape(graph, node.name)
        if node.kind == "input":
            name = "" if node.name == ENTRY else node.name
            if not is_whole:
                return port(node.name, RowText(path, (), cut(name, 24), title=f"{path}: input"))
            return pill(
                node.name, RowText(path, (cut(f"input {name}".strip(), 40),), shape=shape, title=f"{path}: input")
            )
        if node.kind != "call":
            what = f"cat along dimension {node.dim}" if node.kind == "cat" else node.kind
            return ring(node.name, self._row(path, ("+" if what == "add" else node.kind,), what, shape=shape))
        module = graph.get_submodule(node.target)
        if _is_row(module):
            return card(node.name, tuple(self._node_row(graph, member) for member in group))
        names = [source.removeprefix("recall_") for source in node.sources]
        return self._frame(node.name, path, _name(graph, node), module, names, shape)

    def _node_row(self, graph: PlanModule, node: Node) -> RowText:
        path, module = self._prefix[id(graph)] + node.name, graph.get_submodule(node.target)
        return self._row(path, _lines(module), module, _name(graph, node), _shape(graph, node.name))

    def _row(
        self, path: str, lines: tuple[str, ...], what: nn.Module | str, name: str = "", shape: str = ""
    ) -> RowText:
        """The texts of a node: short in the row, complete in the tooltip, with its time if there is a profile."""
        many = 0 if isinstance(what, str) else count(what)
        title = [path, what if isinstance(what, str) else _in_full(what)]
        title += [f"value {shape}"] * bool(shape) + [f"{many:,} params"] * bool(many)
        time, ms, heat = self._times.get(path), "", None
        if time is not None and self._profile is not None:
            inside = [row.ms for row in self._profile.nodes if row.path.startswith(f"{path}.") and not row.is_inner]
            # A frame shows the sum of its rows: its own measurement includes the overhead of the observer.
            own = sum(inside) if time.is_inner and inside else time.ms
            share = own / max(self._profile.node_ms, 1e-9)
            title.append(f"{own:.4g} ms, {100 * share:.1f} % of the time")
            title.append(f"value {in_bytes(time.output_bytes)}, params {in_bytes(time.param_bytes)}")
            ms = f"{own:.{3 if own < 1 else 2 if own < 10 else 1}f}"
            heat = 0.0 if time.is_inner else share / max(self._hottest, 1e-9)
        name = name or "Sequential" * (len(lines) > 1)
        return RowText(path, lines, cut(name, 24), shape, "\n".join(title), ms, heat, many > 0)

    def _frame(self, item: str, path: str, name: str, module: nn.Module, names: Sequence[str], shape: str = "") -> Item:
        """A module with parts as a frame; `names` are those of its input values."""
        look: Look
        if isinstance(module, PlanModule):
            look, scene, what = "graph", self.scene(module), name or module.plan.label
        else:
            look, scene = _verb(module), self._control(module, names)
            what = f"{name}: {_heading(module)}" if name else _heading(module)
        return frame(item, look if what else "bare", self._row(path, (cut(what, 60),), module, shape=shape), scene)

    def _part(self, item: str, name: str, part: object, names: Sequence[str]) -> Item:
        """A part of a control flow module; one that the user made directly may hold a plain function."""
        module = part if isinstance(part, nn.Module) else Function(part)  # type: ignore[arg-type]
        path = self._prefix.get(id(module), "").removesuffix(".")
        if _is_row(module):
            return card(item, (self._row(path, _lines(module), module, name),))
        if isinstance(module, PlanModule):
            name = module.plan.label if name == "body" else f"{name} {module.plan.label}".strip()
        return self._frame(item, path, name, module, names)

    def _control(self, module: nn.Module, names: Sequence[str]) -> Scene:
        inputs = tuple(f"in.{number}" for number in range(len(names)))
        if isinstance(module, Loop):
            items, edges = self._loop(module, inputs, names)
        elif isinstance(module, Gate):
            items, edges = self._gate(module, inputs, names)
        elif isinstance(module, Switch):
            items, edges = self._switch(module, inputs, names)
        else:
            assert isinstance(module, Map), module
            items = [port(inputs[0]), self._part("body", "body", module.body, names), port(EXIT)]
            edges = [*_input_edges(inputs, "body"), Edge("body", EXIT)]
        further = [port(item, RowText("", (), cut(name, 24))) for item, name in zip(inputs[1:], names[1:], strict=True)]
        return Scene((items[0], *further, *items[1:]), tuple(edges), inputs, (EXIT,))

    def _loop(self, loop: Loop, inputs: Sequence[str], names: Sequence[str]) -> tuple[list[Item], list[Edge]]:
        """The body and the edge back; `while` checks its condition before a pass, `until` after it."""
        start, body = dot(inputs[0]), self._part("body", "body", loop.body, names)
        input_edges = _input_edges(inputs, "body")
        if loop.times is not None:
            return [start, body, dot(EXIT)], [*input_edges, Edge("body", EXIT), Edge(EXIT, inputs[0], "again")]
        condition = self._part("condition", "until" if loop.is_until else "while", loop.condition, names[:1])
        if loop.is_until:
            edges = [*input_edges, Edge("body", "condition"), Edge("condition", EXIT, label="yes")]
            return [start, body, condition, port(EXIT)], [
                *edges,
                Edge("condition", inputs[0], "again", label="no", label_width=16.0),
            ]
        edges = [
            Edge(inputs[0], "condition"),
            Edge("condition", "body", label="yes"),
            *input_edges[1:],
            Edge("body", "turn"),
        ]
        edges += [Edge("turn", "condition", "again"), Edge("condition", EXIT, "aside", label="no")]
        return [port(inputs[0]), condition, body, dot("turn", "turn"), port(EXIT)], edges

    def _gate(self, gate: Gate, inputs: Sequence[str], names: Sequence[str]) -> tuple[list[Item], list[Edge]]:
        title = f"the experts' results, weighted by the router ({gate.weighting})"
        items = [port(inputs[0]), self._part("router", "router", gate.router, names[:1])]
        edges = [Edge(inputs[0], "router", "aside")]
        for number, expert in _numbered(gate.experts):
            items.append(self._part(f"expert.{number}", f"expert {number}", expert, names))
            edges += [*_input_edges(inputs, f"expert.{number}"), Edge(f"expert.{number}", "sum")]
        items += [ring("sum", RowText("", ("sum",), title=title)), port(EXIT)]
        return items, [*edges, Edge("router", "sum", "further", label="weights"), Edge("sum", EXIT)]

    def _switch(self, switch: Switch, inputs: Sequence[str], names: Sequence[str]) -> tuple[list[Item], list[Edge]]:
        items = [port(inputs[0]), self._part("selector", "selector", switch.selector, names[:1])]
        edges = [Edge(inputs[0], "selector")]
        for number, branch in _numbered(switch.branches):
            items.append(self._part(f"branch.{number}", "", branch, names))
            edges += [Edge("selector", f"branch.{number}", label=number), Edge(f"branch.{number}", EXIT)]
            edges += _input_edges(inputs, f"branch.{number}")[1:]
        return [*items, port(EXIT)], edges


def _numbered(parts: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Parts with their numbers; many equal modules are drawn as one, since side by side they would be too wide."""
    for _, run in groupby(enumerate(parts), key=lambda pair: repr(pair[1]) if _is_row(pair[1]) else pair[0]):
        numbers, alike = zip(*run, strict=True)
        is_one = len(alike) > MAX_ALIKE
        yield from [(f"{numbers[0]}-{numbers[-1]}", alike[0])] if is_one else zip(map(str, numbers), alike, strict=True)


def _input_edges(inputs: Sequence[str], part: str) -> list[Edge]:
    """The edges into a part of a frame: the stream, and the frame's extra inputs."""
    return [Edge(name, part, "further" if place else "stream", place) for place, name in enumerate(inputs)]


def _is_row(module: nn.Module) -> bool:
    return not isinstance(module, PlanModule | Loop | Gate | Switch | Map)


def _groups(graph: PlanModule, wires: _Wires) -> Iterator[list[Node]]:
    """The nodes that are drawn, grouped into chains, in topological order."""
    chains: dict[str, list[Node]] = {}
    for node in graph.plan.nodes:
        if node.kind in ("recall", "remember") or node.name in wires.hidden:
            continue
        is_plain = node.kind == "call" and _is_row(graph.get_submodule(node.target))
        before = chains.get(node.sources[0]) if is_plain and wires.is_chained(node) else None
        if before and before[0].kind == "call" and _is_row(graph.get_submodule(before[0].target)):
            before.append(node)
            chains[node.name] = before
        else:
            chains[node.name] = [node]
    for chain in {id(chain): chain for chain in chains.values()}.values():
        pieces = -(-len(chain) // MAX_ROWS)
        for piece in range(pieces):
            yield chain[len(chain) * piece // pieces : len(chain) * (piece + 1) // pieces]


def _edges(wires: _Wires, node: Node, owner: dict[str, str], prefix: str) -> Iterator[Edge]:
    for place, source in enumerate(node.sources):
        made_by = wires.plan.node(source)
        if made_by.kind == "recall":
            tag = made_by.name.removeprefix("recall_")
            title = f"{prefix}{made_by.name}, {prefix}remember_{tag}: the value of {tag!r} in the last call"
            maker, label = owner[wires.remembered[made_by.target]], cut(tag, 24)
            yield Edge(maker, node.name, "state", place, label, title, text_width(label, SMALL))
            continue
        origin = wires.hidden.get(source, source)
        title = f"{prefix}{source}\nIdentity()" if source in wires.hidden else ""
        yield Edge(owner[origin], node.name, wires.kind(node, place, source), place, title=title)


def _name(graph: PlanModule, node: Node) -> str:
    """A node's name if the user chose it or if several nodes share its module; otherwise empty."""
    module = graph.get_submodule(node.target)
    if sum(other.target == node.target and other.kind == "call" for other in graph.plan.nodes) > 1:
        return f"{node.target} (shared)"
    kind = module.name if isinstance(module, Function) else type(module).__name__
    is_numbered = re.fullmatch(re.sub(r"\W", "_", kind.lower()) + r"_\d+", node.name)
    return "" if is_numbered else node.name


def _lines(module: nn.Module) -> tuple[str, ...]:
    """The short description of a module; a Sequential has a line per child."""
    parts = list(_steps(module))
    if len(parts) == 1:
        return (cut(short(parts[0]), 44),)
    # Such a row is often a skip beside other nodes, so it should be narrow.
    lines = [line for part in parts[:MAX_LINES] for line in wrap(short(part), 24, subsequent_indent="\u00a0\u00a0")]
    return (*lines, *([f"and {len(parts) - MAX_LINES} more"] if len(parts) > MAX_LINES else []))


def _steps(module: nn.Module) -> Iterator[nn.Module]:
    if type(module) is nn.Sequential and len(module):
        for child in module:
            yield from _steps(child)
    else:
        yield module


def _verb(module: nn.Module) -> Look:
    verbs: dict[type[nn.Module], Look] = {Loop: "loop", Gate: "gate", Switch: "switch", Map: "map"}
    return next(verb for kind, verb in verbs.items() if isinstance(module, kind))


def _heading(module: nn.Module) -> str:
    if isinstance(module, Gate):
        return f"gate {module.weighting}"
    if isinstance(module, Loop) and isinstance(module.condition, nn.Module):
        return f"loop {'until' if module.is_until else 'while'} {short(module.condition)}, at most {module.most}"
    return f"{_verb(module)} {module.extra_repr()}".strip()


def _in_full(module: nn.Module) -> str:
    """A module's repr for a tooltip, without its children if they are drawn themselves."""
    return cut(f"{type(module).__name__}({module.extra_repr()})" if is_inner(module) else repr(module), 600)


def _shape(graph: PlanModule, name: str) -> str:
    if name not in graph.shapes:
        return ""
    return "\u00d7".join(map(str, graph.shapes[name])) or "scalar"
