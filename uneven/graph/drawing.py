"""Pictures of graphs, as text for Mermaid and for Graphviz, which also makes the SVG. `Graph.draw` calls it.

Every node is a shape. A sub-graph and a module with control flow are frames around the shapes of their parts; lines
into a frame end at its ports, so that both languages need lines between shapes alone. One walk through a graph draws
everything; the pen of a language writes it.
"""

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from typing import Literal

from torch import nn

from uneven.errors import InputError, MachineError
from uneven.format import format_bytes
from uneven.graph.control_flow import Gate, Loop, Map, Switch
from uneven.graph.describe import count, is_inner, short
from uneven.graph.function import Function
from uneven.graph.plan import ENTRY, Node, PlanModule
from uneven.graph.profile import Profile

MAX_LINES = 8  # of a Sequential in its shape
MAX_ALIKE = 4  # more equal experts in a row are drawn as one

Kind = Literal["module", "merge", "end", "port"]
LineKind = Literal["stream", "extra", "again", "state"]
# In Graphviz's language, and in Mermaid's.
SHAPES = {"module": "box", "merge": "circle", "end": "ellipse", "port": "point"}
STYLES = {"state": "style=dashed constraint=false", "again": "constraint=false", "extra": "color=purple"}
BRACKETS = {"module": ("[", "]"), "merge": ("((", "))"), "end": ("([", "])"), "port": ("((", "))")}
ARROWS = {"state": "-.->", "again": "==>"}


class DotPen:
    """Graphviz's language: a cluster for every frame, details in tooltips."""

    def __init__(self) -> None:
        self._body: list[str] = []
        self._lines: list[str] = []
        self._indent = "  "
        self._num_keys = 0

    def _key(self) -> str:
        self._num_keys += 1
        return f"n{self._num_keys}"

    def shape(self, kind: Kind, text: Sequence[str], tooltip: str = "", heat: float = 0.0) -> str:
        """Draw a shape; returns its key. `heat` is 1 for the node that takes most time."""
        key, fill = self._key(), _heat_colour(heat) if heat else ""
        label, beside = ("", text) if kind == "port" else (text, "")
        texts = _texts(label="\n".join(label), xlabel="\n".join(beside), tooltip=tooltip, fillcolor=fill)
        self._body.append(f"{self._indent}{key} [shape={SHAPES[kind]}{texts}]")
        return key

    def begin_frame(self, title: str, tooltip: str) -> None:
        """What is drawn until `end_frame` is inside."""
        self._body.append(f"{self._indent}subgraph cluster_{self._key()} {{")
        self._body.append(f"{self._indent}  label={_quoted(title)} tooltip={_quoted(tooltip)}")
        self._indent += "  "

    def end_frame(self) -> None:
        self._indent = self._indent[2:]
        self._body.append(f"{self._indent}}}")

    def line(self, source: str, target: str, kind: LineKind = "stream", label: str = "", tooltip: str = "") -> None:
        texts = _texts(label=label, tooltip=tooltip)
        self._lines.append(f"  {source} -> {target} [{STYLES.get(kind, '')}{texts}]")

    def text(self, title: str) -> str:
        """All that was drawn."""
        head = [
            f'  label={_quoted(title)} labelloc=t labeljust=l fontname="Helvetica"',
            '  node [style="rounded,filled" fillcolor=white fontname="Helvetica" fontsize=11]',
            '  edge [fontname="Helvetica" fontsize=10]',
        ]
        return "\n".join(["digraph {", *head, *self._body, *self._lines, "}", ""])


class MermaidPen(DotPen):
    """A Mermaid flowchart, which GitHub and notebooks draw in Markdown; it has no tooltips."""

    def shape(self, kind: Kind, text: Sequence[str], tooltip: str = "", heat: float = 0.0) -> str:
        del tooltip
        key, (before, after) = self._key(), BRACKETS[kind]
        self._body.append(f"{self._indent}{key}{before}{_in_mermaid(chr(10).join(text))}{after}")
        if heat:
            self._body.append(f"{self._indent}style {key} fill:{_heat_colour(heat)}")
        return key

    def begin_frame(self, title: str, tooltip: str) -> None:
        del tooltip
        self._body.append(f"{self._indent}subgraph {self._key()}[{_in_mermaid(title)}]")
        self._indent += "  "

    def end_frame(self) -> None:
        self._indent = self._indent[2:]
        self._body.append(f"{self._indent}end")

    def line(self, source: str, target: str, kind: LineKind = "stream", label: str = "", tooltip: str = "") -> None:
        del tooltip
        words = f"|{_in_mermaid(label)}|" if label else ""
        self._lines.append(f"  {source} {ARROWS.get(kind, '-->')}{words} {target}")

    def text(self, title: str) -> str:
        head = f"---\ntitle: {_in_mermaid(title)}\n---"
        return "\n".join([head, "flowchart TD", *self._body, *self._lines, ""])


@dataclass(frozen=True)
class Ends:
    """The shapes at which lines into a node end, one per input, and the shape at which lines from it begin."""

    entries: tuple[str, ...]
    exit: str

    def entry(self, place: int) -> str:
        return self.entries[min(place, len(self.entries) - 1)]


def draw(graph: PlanModule, path: Path | None, profile: Profile | None) -> str:
    """The text of the picture, written to the path if there is one. The ending chooses the language."""
    suffix = ".mmd" if path is None else path.suffix.lower()
    if suffix not in (".svg", ".dot", ".mmd"):
        raise InputError(f"draw({str(path)!r}): the file name must end in .svg, .dot or .mmd (Mermaid)")
    if path is not None and not path.parent.is_dir():
        raise InputError(f"draw({str(path)!r}): there is no folder {str(path.parent)!r}; make it first")
    text = _Walk(graph, profile, MermaidPen() if suffix == ".mmd" else DotPen()).text
    if suffix == ".svg":
        text = to_svg(text)
    if path is not None:
        path.write_text(text, encoding="utf-8", newline="\n")
    return text


class _Walk:
    """Draws a graph and the graphs inside it, with paths, value shapes and times."""

    def __init__(self, root: PlanModule, profile: Profile | None, pen: DotPen) -> None:
        self._profile, self._pen = profile, pen
        self._prefix = {id(module): f"{path}." if path else "" for path, module in root.named_modules()}
        self._times = {row.path: row for row in profile.nodes} if profile else {}
        graphs = [module for module in root.modules() if isinstance(module, PlanModule)]
        known = {self._prefix[id(graph)] + node.name for graph in graphs for node in graph.plan.nodes}
        if unknown := next((path for path in self._times if path not in known), None):
            raise InputError(f"draw(profile=...): the profile is of another graph: this one has no node {unknown!r}")
        shares = [profile.share(row) for row in profile.nodes if not row.is_inner] if profile else []
        self._hottest = max(shares, default=0.0)
        self._graph(root, is_whole=True)
        title = f"{_cut(root.plan.label or 'graph', 80)}: {count(root):,} params"
        if profile is not None:
            title += f"; darkest: {100 * self._hottest:.1f} % of the {profile.node_ms:.3g} ms of all nodes"
        self.text = pen.text(title)

    def _graph(self, graph: PlanModule, is_whole: bool = False) -> Ends:
        """The nodes of one graph. Inputs and outputs are shapes with text in the whole graph, and ports in a part."""
        plan, prefix = graph.plan, self._prefix[id(graph)]
        drawn = [node for node in plan.nodes if node.kind not in ("recall", "remember")]
        ends = {node.name: self._node(graph, node, is_whole) for node in drawn}
        last = {node.target: node.sources[1] for node in plan.nodes if node.kind == "remember"}
        for node in drawn:
            for place, source in enumerate(node.sources):
                target, made_by = ends[node.name].entry(place), plan.node(source)
                if made_by.kind == "recall":
                    tag = made_by.name.removeprefix("recall_")
                    tooltip = f"{prefix}{made_by.name}, {prefix}remember_{tag}: the value of {tag!r} in the last call"
                    self._pen.line(ends[last[made_by.target]].exit, target, "state", _cut(tag, 24), tooltip)
                else:
                    is_extra = node.kind == "call" and node.verb != "merge" and place > 0
                    self._pen.line(ends[source].exit, target, "extra" if is_extra else "stream")
        exits = []
        for number, name in enumerate(plan.outputs if is_whole else plan.outputs[:1]):
            tags = " ".join(plan.tags_of(name)) if number else ""
            text = (_cut(f"output {tags}".strip(), 40), _value(graph, name)) if is_whole else ()
            exits.append(self._shape("end" if is_whole else "port", text, prefix + name).exit)
            self._pen.line(ends[name].exit, exits[-1])
        return Ends(tuple(ends[name].exit for name in plan.inputs), exits[0])

    def _node(self, graph: PlanModule, node: Node, is_whole: bool) -> Ends:
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

    def _shape(self, kind: Kind, text: Iterable[str], tooltip: str = "", heat: float = 0.0) -> Ends:
        key = self._pen.shape(kind, tuple(filter(None, text)), tooltip, heat)
        return Ends((key,), key)

    def _module(self, path: str, name: str, module: nn.Module, value: str = "") -> Ends:
        text = (_cut(name, 24), *_lines_of(module), value, self._ms(path))
        return self._shape("module", text, self._tooltip(path, module, value), self._heat(path))

    def _frame(self, path: str, name: str, module: nn.Module, names: Sequence[str], value: str = "") -> Ends:
        """A module with parts; `names` are those of its input values."""
        if isinstance(module, PlanModule):
            title = name or module.plan.label
        else:
            title = ": ".join(filter(None, (name, _heading(module))))
        title = " ".join(filter(None, (_cut(title, 60), self._ms(path))))
        self._pen.begin_frame(title, self._tooltip(path, module, value))
        ends = self._graph(module) if isinstance(module, PlanModule) else self._control(module, names)
        self._pen.end_frame()
        return ends

    def _part(self, name: str, part: object, names: Sequence[str]) -> Ends:
        """A part of a control flow module; one that the user made directly may hold a plain function."""
        module = part if isinstance(part, nn.Module) else Function(part)  # type: ignore[arg-type]
        path = self._prefix.get(id(module), "").removesuffix(".")
        if isinstance(module, PlanModule):
            name = module.plan.label if name == "body" else f"{name} {module.plan.label}".strip()
        elif not _is_control(module):
            return self._module(path, name, module)
        return self._frame(path, name, module, names)

    def _control(self, module: nn.Module, names: Sequence[str]) -> Ends:
        """Ports around the parts of a loop, gate, switch or map; the extra inputs lead to its body or branches."""
        ports = [self._shape("port", (_cut(name, 24),) if place else ()).exit for place, name in enumerate(names)]
        ends = Ends(tuple(ports), self._shape("port", ()).exit)
        if isinstance(module, Loop):
            self._loop(module, ends, names)
        elif isinstance(module, Gate):
            self._gate(module, ends, names)
        elif isinstance(module, Switch):
            self._switch(module, ends, names)
        elif isinstance(module, Map):
            self._into(self._part("body", module.body, names), ends, ends.exit)
        return ends

    def _into(self, part: Ends, frame: Ends, target: str, stream: str | None = None, label: str = "") -> None:
        """The lines into a part of a frame, the stream and the frame's extra inputs, and the one from it."""
        self._pen.line(stream or frame.entries[0], part.entry(0), label=label)
        for place, port in enumerate(frame.entries[1:], 1):
            self._pen.line(port, part.entry(place), "extra")
        self._pen.line(part.exit, target)

    def _loop(self, loop: Loop, ends: Ends, names: Sequence[str]) -> None:
        """The body and the line back; `while` checks its condition before a pass, `until` after it."""
        start, line = ends.entries[0], self._pen.line
        if loop.times is not None:
            body = self._part("body", loop.body, names)
            self._into(body, ends, ends.exit)
            line(body.exit, start, "again")
        elif loop.is_until:
            body = self._part("body", loop.body, names)
            verdict = self._part("until", loop.condition, names[:1])
            self._into(body, ends, verdict.entry(0))
            line(verdict.exit, start, "again", "no")
            line(verdict.exit, ends.exit, label="yes")
        else:
            verdict = self._part("while", loop.condition, names[:1])
            body = self._part("body", loop.body, names)
            line(start, verdict.entry(0))
            line(verdict.exit, body.entry(0), label="yes")
            for place, port in enumerate(ends.entries[1:], 1):
                line(port, body.entry(place), "extra")
            line(body.exit, verdict.entry(0), "again")
            line(verdict.exit, ends.exit, label="no")

    def _gate(self, gate: Gate, ends: Ends, names: Sequence[str]) -> None:
        scores = self._part("router", gate.router, names[:1])
        total = self._shape("merge", ("sum",), f"the experts' results, weighted by the router ({gate.weighting})").exit
        self._pen.line(ends.entries[0], scores.entry(0))
        self._pen.line(scores.exit, total, "extra", "weights")
        for number, expert in _numbered(gate.experts):
            self._into(self._part(f"expert {number}", expert, names), ends, total)
        self._pen.line(total, ends.exit)

    def _switch(self, switch: Switch, ends: Ends, names: Sequence[str]) -> None:
        choice = self._part("selector", switch.selector, names[:1])
        self._pen.line(ends.entries[0], choice.entry(0))
        for number, branch in _numbered(switch.branches):
            self._into(self._part("", branch, names), ends, ends.exit, choice.exit, number)

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
            lines.append(f"value {format_bytes(row.output_bytes)}, params {format_bytes(row.param_bytes)}")
        return "\n".join(lines)


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


def _heat_colour(heat: float) -> str:
    return f"#f0680f{round(0.75 * 255 * heat):02x}"


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
