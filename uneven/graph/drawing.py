"""Pictures of graphs, as text for Mermaid and for Graphviz, which also makes the SVG. `Graph.draw` calls it.

Every node is a shape. A sub-graph and a module with control flow are frames around the shapes of their parts; lines
into a frame end at its ports, so that both languages need lines between shapes alone.
"""

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from typing import Literal, Union

from torch import nn

from uneven.errors import InputError, MachineError
from uneven.graph.control_flow import Gate, Loop, Map, Switch
from uneven.graph.describe import count, in_bytes, is_inner, short
from uneven.graph.function import Function
from uneven.graph.plan import ENTRY, Node, PlanModule
from uneven.graph.profile import Profile

MAX_LINES = 8  # of a Sequential in its shape
MAX_ALIKE = 4  # more equal experts in a row are drawn as one

Kind = Literal["module", "merge", "end", "port"]
LineKind = Literal["stream", "extra", "again", "state"]


@dataclass(frozen=True)
class Shape:
    key: str  # unique in the picture
    kind: Kind
    text: tuple[str, ...] = ()
    tooltip: str = ""
    heat: float = 0.0  # 1: the node that takes most time


@dataclass(frozen=True)
class Frame:
    key: str
    title: str
    tooltip: str
    parts: list[Union[Shape, "Frame"]] = field(default_factory=list)


@dataclass(frozen=True)
class Line:
    source: str
    target: str
    kind: LineKind = "stream"
    label: str = ""
    tooltip: str = ""


@dataclass(frozen=True)
class Ends:
    """The shapes at which lines into a node end, one per input, and the shape at which lines from it begin."""

    entries: tuple[str, ...]
    exit: str

    def entry(self, place: int) -> str:
        return self.entries[min(place, len(self.entries) - 1)]


Parts = list[Shape | Frame]


def draw(graph: PlanModule, path: Path | None, profile: Profile | None) -> str:
    """The text of the picture, written to the path if there is one. The ending chooses the language."""
    suffix = ".mmd" if path is None else path.suffix.lower()
    if suffix not in (".svg", ".dot", ".mmd"):
        raise InputError(f"draw({str(path)!r}): the file name must end in .svg, .dot or .mmd (Mermaid)")
    if path is not None and not path.parent.is_dir():
        raise InputError(f"draw({str(path)!r}): there is no folder {str(path.parent)!r}; make it first")
    picture = _Picture(graph, profile)
    text = to_mermaid(picture) if suffix == ".mmd" else to_dot(picture)
    if suffix == ".svg":
        text = to_svg(text)
    if path is not None:
        path.write_text(text, encoding="utf-8", newline="\n")
    return text


class _Picture:
    """The shapes, frames and lines of a graph and of the graphs inside it, with paths, value shapes and times."""

    def __init__(self, root: PlanModule, profile: Profile | None) -> None:
        self._profile = profile
        self._prefix = {id(module): f"{path}." if path else "" for path, module in root.named_modules()}
        self._times = {row.path: row for row in profile.nodes} if profile else {}
        graphs = [module for module in root.modules() if isinstance(module, PlanModule)]
        known = {self._prefix[id(graph)] + node.name for graph in graphs for node in graph.plan.nodes}
        if unknown := next((path for path in self._times if path not in known), None):
            raise InputError(f"draw(profile=...): the profile is of another graph: this one has no node {unknown!r}")
        shares = [profile.share(row) for row in profile.nodes if not row.is_inner] if profile else []
        self._hottest = max(shares, default=0.0)
        self._num_keys = 0
        self.lines: list[Line] = []
        self.parts = self._graph(root, is_whole=True)[0]
        self.title = f"{_cut(root.plan.label or 'graph', 80)}: {count(root):,} params"
        if profile is not None:
            self.title += f"; darkest: {100 * self._hottest:.1f} % of the {profile.node_ms:.3g} ms of all nodes"

    def _key(self) -> str:
        self._num_keys += 1
        return f"n{self._num_keys}"

    def _graph(self, graph: PlanModule, is_whole: bool = False) -> tuple[Parts, Ends]:
        """The nodes of one graph. Inputs and outputs are shapes with text in the whole graph, and ports in a part."""
        plan, prefix = graph.plan, self._prefix[id(graph)]
        parts: Parts = []
        ends: dict[str, Ends] = {}
        drawn = [node for node in plan.nodes if node.kind not in ("recall", "remember")]
        for node in drawn:
            part, ends[node.name] = self._node(graph, node, is_whole)
            parts.append(part)
        last = {node.target: node.sources[1] for node in plan.nodes if node.kind == "remember"}
        for node in drawn:
            for place, source in enumerate(node.sources):
                target, made_by = ends[node.name].entry(place), plan.node(source)
                if made_by.kind == "recall":
                    tag = made_by.name.removeprefix("recall_")
                    tooltip = f"{prefix}{made_by.name}, {prefix}remember_{tag}: the value of {tag!r} in the last call"
                    self.lines.append(Line(ends[last[made_by.target]].exit, target, "state", _cut(tag, 24), tooltip))
                else:
                    is_extra = node.kind == "call" and node.verb != "merge" and place > 0
                    self.lines.append(Line(ends[source].exit, target, "extra" if is_extra else "stream"))
        exits = []
        for number, name in enumerate(plan.outputs if is_whole else plan.outputs[:1]):
            tags = " ".join(plan.tags_of(name)) if number else ""
            text = (_cut(f"output {tags}".strip(), 40), _value(graph, name)) if is_whole else ()
            exits.append(self._shape("end" if is_whole else "port", text, prefix + name)[0])
            self.lines.append(Line(ends[name].exit, exits[-1].key))
        return [*parts, *exits], Ends(tuple(ends[name].exit for name in plan.inputs), exits[0].key)

    def _node(self, graph: PlanModule, node: Node, is_whole: bool) -> tuple[Shape | Frame, Ends]:
        path, value = self._prefix[id(graph)] + node.name, _value(graph, node.name)
        if node.kind == "input":
            name = "" if node.name == ENTRY else node.name
            text = (_cut(f"input {name}".strip(), 40), value) if is_whole else (_cut(name, 24),)
            return self._shape("end" if is_whole else "port", text, f"{path}: input")
        if node.kind != "call":
            what = f"cat along dimension {node.dim}" if node.kind == "cat" else node.kind
            text = ("+" if node.kind == "add" else node.kind, value)
            return self._shape("merge", (*text, self._ms(path)), self._tooltip(path, what, value), self._heat(path))
        module = graph.get_submodule(node.target)
        if isinstance(module, PlanModule) or _is_control(module):
            names = [source.removeprefix("recall_") for source in node.sources]
            return self._frame(path, _name(graph, node), module, names, value)
        return self._module(path, _name(graph, node), module, value)

    def _shape(self, kind: Kind, text: Iterable[str], tooltip: str = "", heat: float = 0.0) -> tuple[Shape, Ends]:
        shape = Shape(self._key(), kind, tuple(filter(None, text)), tooltip, heat)
        return shape, Ends((shape.key,), shape.key)

    def _module(self, path: str, name: str, module: nn.Module, value: str = "") -> tuple[Shape, Ends]:
        text = (_cut(name, 24), *_lines_of(module), value, self._ms(path))
        return self._shape("module", text, self._tooltip(path, module, value), self._heat(path))

    def _frame(
        self, path: str, name: str, module: nn.Module, names: Sequence[str], value: str = ""
    ) -> tuple[Frame, Ends]:
        """A module with parts; `names` are those of its input values."""
        if isinstance(module, PlanModule):
            title = name or module.plan.label
            parts, ends = self._graph(module)
        else:
            title = f"{name}: {_heading(module)}" if name else _heading(module)
            parts, ends = self._control(module, names)
        title = " ".join(filter(None, (_cut(title, 60), self._ms(path))))
        return Frame(self._key(), title, self._tooltip(path, module, value), parts), ends

    def _part(self, name: str, part: object, names: Sequence[str]) -> tuple[Shape | Frame, Ends]:
        """A part of a control flow module; one that the user made directly may hold a plain function."""
        module = part if isinstance(part, nn.Module) else Function(part)  # type: ignore[arg-type]
        path = self._prefix.get(id(module), "").removesuffix(".")
        if isinstance(module, PlanModule):
            name = module.plan.label if name == "body" else f"{name} {module.plan.label}".strip()
        elif not _is_control(module):
            return self._module(path, name, module)
        return self._frame(path, name, module, names)

    def _control(self, module: nn.Module, names: Sequence[str]) -> tuple[Parts, Ends]:
        """Ports around the parts of a loop, gate, switch or map; the extra inputs lead to its body or branches."""
        ports = [self._shape("port", (_cut(name, 24),) if place else ())[0] for place, name in enumerate(names)]
        out = self._shape("port", ())[0]
        ends = Ends(tuple(port.key for port in ports), out.key)
        if isinstance(module, Loop):
            inner = self._loop(module, ends, names)
        elif isinstance(module, Gate):
            inner = self._gate(module, ends, names)
        elif isinstance(module, Switch):
            inner = self._switch(module, ends, names)
        else:
            assert isinstance(module, Map), module
            body, at = self._part("body", module.body, names)
            self._lines_into(at, ends)
            self.lines.append(Line(at.exit, ends.exit))
            inner = [body]
        return [*ports, *inner, out], ends

    def _lines_into(self, part: Ends, frame: Ends, stream: str | None = None, label: str = "") -> None:
        """The lines into a part of a frame: the stream, and the frame's extra inputs."""
        self.lines.append(Line(stream or frame.entries[0], part.entry(0), label=label))
        for place, port in enumerate(frame.entries[1:], 1):
            self.lines.append(Line(port, part.entry(place), "extra"))

    def _loop(self, loop: Loop, ends: Ends, names: Sequence[str]) -> Parts:
        """The body and the line back; `while` checks its condition before a pass, `until` after it."""
        start = ends.entries[0]
        body, at = self._part("body", loop.body, names)
        if loop.times is not None:
            self._lines_into(at, ends)
            self.lines += [Line(at.exit, ends.exit), Line(at.exit, start, "again")]
            return [body]
        condition, verdict = self._part("until" if loop.is_until else "while", loop.condition, names[:1])
        if loop.is_until:
            self._lines_into(at, ends)
            self.lines += [Line(at.exit, verdict.entry(0)), Line(verdict.exit, start, "again", "no")]
            self.lines.append(Line(verdict.exit, ends.exit, label="yes"))
            return [body, condition]
        self._lines_into(at, ends, stream=verdict.exit, label="yes")
        self.lines += [Line(start, verdict.entry(0)), Line(at.exit, verdict.entry(0), "again")]
        self.lines.append(Line(verdict.exit, ends.exit, label="no"))
        return [condition, body]

    def _gate(self, gate: Gate, ends: Ends, names: Sequence[str]) -> Parts:
        router, scores = self._part("router", gate.router, names[:1])
        total, at = self._shape("merge", ("sum",), f"the experts' results, weighted by the router ({gate.weighting})")
        self.lines += [Line(ends.entries[0], scores.entry(0)), Line(scores.exit, at.exit, "extra", "weights")]
        parts: Parts = [router]
        for number, expert in _numbered(gate.experts):
            part, inside = self._part(f"expert {number}", expert, names)
            parts.append(part)
            self._lines_into(inside, ends)
            self.lines.append(Line(inside.exit, at.exit))
        self.lines.append(Line(at.exit, ends.exit))
        return [*parts, total]

    def _switch(self, switch: Switch, ends: Ends, names: Sequence[str]) -> Parts:
        selector, choice = self._part("selector", switch.selector, names[:1])
        self.lines.append(Line(ends.entries[0], choice.entry(0)))
        parts: Parts = [selector]
        for number, branch in _numbered(switch.branches):
            part, inside = self._part("", branch, names)
            parts.append(part)
            self._lines_into(inside, ends, stream=choice.exit, label=number)
            self.lines.append(Line(inside.exit, ends.exit))
        return parts

    def _own_ms(self, path: str) -> float | None:
        """The time of a node. A frame's is the sum of its nodes: its own includes the overhead of the observer."""
        time = self._times.get(path)
        if time is None or self._profile is None:
            return None
        inside = [row.ms for row in self._profile.nodes if row.path.startswith(f"{path}.") and not row.is_inner]
        return sum(inside) if time.is_inner and inside else time.ms

    def _ms(self, path: str) -> str:
        ms = self._own_ms(path)
        return "" if ms is None else f"{ms:.{3 if ms < 1 else 2 if ms < 10 else 1}f} ms"

    def _heat(self, path: str) -> float:
        row = self._times.get(path)
        return 0.0 if row is None or self._profile is None else self._profile.share(row) / max(self._hottest, 1e-9)

    def _tooltip(self, path: str, what: nn.Module | str, value: str) -> str:
        many = 0 if isinstance(what, str) else count(what)
        lines = [path, what if isinstance(what, str) else _in_full(what)]
        lines += [f"value {value}"] * bool(value) + [f"{many:,} params"] * bool(many)
        ms = self._own_ms(path)
        if ms is not None and self._profile is not None:
            row = self._times[path]
            lines.append(f"{ms:.4g} ms, {100 * ms / max(self._profile.node_ms, 1e-9):.1f} % of the time")
            lines.append(f"value {in_bytes(row.output_bytes)}, params {in_bytes(row.param_bytes)}")
        return "\n".join(lines)


def to_dot(picture: _Picture) -> str:
    """The picture in Graphviz's language: a cluster for every frame, details in tooltips."""
    shapes = {"module": "box", "merge": "circle", "end": "ellipse", "port": "point"}
    styles = {"state": "style=dashed constraint=false", "again": "constraint=false", "extra": "color=purple"}

    def parts_of(parts: Parts, indent: str) -> Iterator[str]:
        for part in parts:
            if isinstance(part, Frame):
                yield f"{indent}subgraph cluster_{part.key} {{"
                yield f"{indent}  label={_quoted(part.title)} tooltip={_quoted(part.tooltip)}"
                yield from parts_of(part.parts, f"{indent}  ")
                yield f"{indent}}}"
                continue
            fill = _heat_colour(part) if part.heat else ""
            label, beside = ("", part.text) if part.kind == "port" else (part.text, "")
            texts = _texts(label="\n".join(label), xlabel="\n".join(beside), tooltip=part.tooltip, fillcolor=fill)
            yield f"{indent}{part.key} [shape={shapes[part.kind]}{texts}]"

    lines = [
        f"{line.source} -> {line.target} [{styles.get(line.kind, '')}{_texts(label=line.label, tooltip=line.tooltip)}]"
        for line in picture.lines
    ]
    head = [
        f'label={_quoted(picture.title)} labelloc=t labeljust=l fontname="Helvetica"',
        'node [style="rounded,filled" fillcolor=white fontname="Helvetica" fontsize=11]',
        'edge [fontname="Helvetica" fontsize=10]',
    ]
    inside = [f"  {line}" for line in head] + list(parts_of(picture.parts, "  ")) + [f"  {line}" for line in lines]
    return "\n".join(["digraph {", *inside, "}", ""])


def to_svg(dot: str) -> str:
    program = shutil.which("dot")
    if program is None:
        raise MachineError(
            "an SVG is drawn by Graphviz, whose program `dot` is not on this machine: install the package graphviz "
            "(apt install graphviz, brew install graphviz, conda install graphviz), or draw a .mmd or .dot file"
        )
    done = subprocess.run([program, "-Tsvg"], input=dot, capture_output=True, text=True, encoding="utf-8", check=False)
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise MachineError(f"Graphviz ({program}) cannot draw this graph: {reason}; draw a .mmd or .dot file instead")
    return done.stdout


def to_mermaid(picture: _Picture) -> str:
    """The picture as a Mermaid flowchart, which GitHub and notebooks draw in Markdown."""
    shapes = {"module": ("[", "]"), "merge": ("((", "))"), "end": ("([", "])"), "port": ("((", "))")}
    arrows = {"state": "-.->", "again": "==>"}

    def parts_of(parts: Parts, indent: str) -> Iterator[str]:
        for part in parts:
            if isinstance(part, Frame):
                yield f"{indent}subgraph {part.key}[{_in_mermaid(part.title)}]"
                yield from parts_of(part.parts, f"{indent}  ")
                yield f"{indent}end"
                continue
            before, after = shapes[part.kind]
            yield f"{indent}{part.key}{before}{_in_mermaid(chr(10).join(part.text))}{after}"
            if part.heat:
                yield f"{indent}style {part.key} fill:{_heat_colour(part)}"

    lines = [
        f"  {line.source} {arrows.get(line.kind, '-->')}{f'|{_in_mermaid(line.label)}|' if line.label else ''} "
        f"{line.target}"
        for line in picture.lines
    ]
    title = f"---\ntitle: {_in_mermaid(picture.title)}\n---"
    return "\n".join([title, "flowchart TD", *parts_of(picture.parts, "  "), *lines, ""])


def _heat_colour(shape: Shape) -> str:
    return f"#f0680f{round(0.75 * 255 * shape.heat):02x}"


def _texts(**texts: str) -> str:
    """Attributes of a shape or line in Graphviz's language, without those that are empty."""
    return "".join(f" {name}={_quoted(text)}" for name, text in texts.items() if text)


def _quoted(text: str) -> str:
    clean = _printable(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{clean}"'


def _in_mermaid(text: str) -> str:
    clean = escape(_printable(text).replace("#", "\uff03"), quote=False).replace('"', "#quot;").replace("\n", "<br/>")
    return f'"{clean or " "}"'


def _printable(text: str) -> str:
    """The text with characters that XML does not allow replaced by "?"."""
    return re.sub("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "\u2026"


def _is_control(module: nn.Module) -> bool:
    return isinstance(module, Loop | Gate | Switch | Map)


def _numbered(parts: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Parts with their numbers; many equal modules are drawn as one, since side by side they would be too wide."""

    def look(pair: tuple[int, nn.Module]) -> str | int:
        return pair[0] if isinstance(pair[1], PlanModule) or _is_control(pair[1]) else repr(pair[1])

    for _, run in groupby(enumerate(parts), key=look):
        numbers, alike = zip(*run, strict=True)
        is_one = len(alike) > MAX_ALIKE
        yield from [(f"{numbers[0]}-{numbers[-1]}", alike[0])] if is_one else zip(map(str, numbers), alike, strict=True)


def _name(graph: PlanModule, node: Node) -> str:
    """A node's name if the user chose it or if several nodes share its module; otherwise empty."""
    module = graph.get_submodule(node.target)
    if sum(other.target == node.target and other.kind == "call" for other in graph.plan.nodes) > 1:
        return f"{node.target} (shared)"
    kind = module.name if isinstance(module, Function) else type(module).__name__
    is_numbered = re.fullmatch(re.sub(r"\W", "_", kind.lower()) + r"_\d+", node.name)
    return "" if is_numbered else node.name


def _lines_of(module: nn.Module) -> tuple[str, ...]:
    """The short description of a module; a Sequential has a line per child."""
    steps = list(_steps(module))
    if len(steps) == 1:
        return (_cut(short(steps[0]), 44),)
    lines = [line for step in steps[:MAX_LINES] for line in wrap(short(step), 24)]
    return (*lines, *([f"and {len(steps) - MAX_LINES} more"] if len(steps) > MAX_LINES else []))


def _steps(module: nn.Module) -> Iterator[nn.Module]:
    if type(module) is nn.Sequential and len(module):
        for child in module:
            yield from _steps(child)
    else:
        yield module


def _heading(module: nn.Module) -> str:
    if isinstance(module, Gate):
        return f"gate {module.weighting}"
    if isinstance(module, Loop) and isinstance(module.condition, nn.Module):
        return f"loop {'until' if module.is_until else 'while'} {short(module.condition)}, at most {module.most}"
    return f"{type(module).__name__.lower()} {module.extra_repr()}".strip()


def _in_full(module: nn.Module) -> str:
    """A module's repr for a tooltip, without its children if they are drawn themselves."""
    return _cut(f"{type(module).__name__}({module.extra_repr()})" if is_inner(module) else repr(module), 600)


def _value(graph: PlanModule, name: str) -> str:
    """The shape of a node's value in the example, or "" without one."""
    if name not in graph.shapes:
        return ""
    return "\u00d7".join(map(str, graph.shapes[name])) or "scalar"
