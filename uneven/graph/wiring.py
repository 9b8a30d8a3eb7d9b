"""What FlowBuilder records, notes, and from them to a plan: every value gets a node, every module a name.

`FlowBuilder.build` calls `wire`. Mistakes are reported here with the node and the fix: unknown tags, names that are
used twice, results that are not used.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal, Union

from torch import Tensor, nn

from uneven.errors import InputError
from uneven.graph.function import Function
from uneven.graph.graph import Graph
from uneven.graph.memory import Memory
from uneven.graph.plan import ENTRY, Node, Plan, Verb

Merge = Literal["add", "mean", "cat"]
Part = Union[nn.Module, Callable[..., Any], "Flow"]


@dataclass(frozen=True)
class Use:
    """A tagged value as an extra input; `start` and `detach` matter only for state across calls."""

    tag: str
    start: Callable[[Tensor], Tensor] | None = None
    detach: bool = True


@dataclass
class Call:
    """A call of a part: on the stream (through), as a residual (also), or beside the stream (fork)."""

    verb: Verb
    part: Part
    skip: Part | None = None
    over: str | None = None  # the tag whose value is used instead of the stream
    using: list[Use] = field(default_factory=list)


@dataclass
class Branches:
    """Parts that run on the same stream, and how their results are merged."""

    parts: list[Part]
    tags: list[str] = field(default_factory=list)
    merge: Merge | Callable[..., Any] = "add"  # set by `.merge(...)`
    dim: int = 1


@dataclass(frozen=True)
class Tag:
    name: str


class Flow:
    """Notes in the order of the verbs. As a part, a flow with a name becomes a sub-graph, one without is inlined."""

    def __init__(self) -> None:
        self.notes: list[Call | Branches | Tag] = []
        self.inputs: list[str] = []
        self.name = ""
        self.is_placed = False  # used as a part of another flow, so it must not change any more


def wire(flow: Flow, outputs: tuple[str, ...] = ()) -> Graph:
    """The graph of a flow; InputError if the flow has a mistake."""
    if not flow.notes:
        raise InputError("the flow is empty: give it a part, as in FlowBuilder.from_(nn.Linear(4, 2)).build()")
    wiring = _Wiring(flow)
    end = wiring.add_flow(flow, ENTRY)
    plan = wiring.plan(end, outputs)
    _refuse_unused(plan, wiring.modules)
    return Graph(plan, wiring.modules)


def _all_tags(flow: Flow) -> Iterator[str]:
    """Every tag in the flow and in the flows inlined in it."""
    for note in flow.notes:
        if isinstance(note, Tag):
            yield note.name
        if isinstance(note, Branches):
            yield from note.tags
        for part in _parts(note):
            if isinstance(part, Flow) and not part.name:
                yield from _all_tags(part)


def _all_labels(flow: Flow) -> Iterator[str]:
    """The names that labelled flows and graphs will have as modules of this flow."""
    for note in flow.notes:
        for part in _parts(note):
            if isinstance(part, Flow) and not part.name:
                yield from _all_labels(part)
            elif label := _label(part):
                yield label


def _parts(note: Call | Branches | Tag) -> list[Part | None]:
    if isinstance(note, Call):
        return [note.part, note.skip]
    return list(note.parts) if isinstance(note, Branches) else []


def _label(part: Part | None) -> str:
    return part.name if isinstance(part, Flow) else part.plan.label if isinstance(part, Graph) else ""


class _Wiring:
    """Builds the plan of one graph, note by note; `plan` returns it."""

    def __init__(self, flow: Flow) -> None:
        self.modules: dict[str, nn.Module] = {}
        self._label = flow.name
        self._nodes = {name: Node(name, "input") for name in (ENTRY, *flow.inputs)}
        self._tags: dict[str, str] = {}
        self._all_tags = list(_all_tags(flow))
        self._labels = set(_all_labels(flow))
        self._recalls: dict[str, Node] = {}  # tag -> node that reads its value of the last call
        self._uses: dict[str, Use] = {}  # the same tags -> their `using`
        self._skip_tags: list[str] = []  # tags in a skip, while the nodes of the part beside it are added
        self._module_names: dict[int, str] = {}  # id of a part -> name of its module
        self._last = ENTRY  # the node that a tag would name

    def plan(self, end: str, outputs: tuple[str, ...]) -> Plan:
        return Plan(self._label, tuple(self._nodes.values()), (end, *map(self._find, outputs)), dict(self._tags))

    def add_flow(self, flow: Flow, stream: str) -> str:
        """Add the nodes of a flow whose stream starts at this node; returns the node at the end of its stream."""
        for index, note in enumerate(flow.notes):
            following = flow.notes[index + 1] if index + 1 < len(flow.notes) else None
            wanted = following.name if isinstance(following, Tag) else ""  # the module takes the name of its tag
            if isinstance(note, Tag):
                self._tag(note.name, self._last)
            elif isinstance(note, Branches):
                stream = self._last = self._branches(note, stream, wanted)
            else:
                self._last = self._call(note, stream, wanted)
                stream = stream if note.verb == "fork" else self._last
        return stream

    def _call(self, note: Call, stream: str, wanted: str) -> str:
        start = stream if note.over is None else self._find(note.over)
        is_sum = note.verb == "also"
        outer_skip_tags = self._skip_tags
        if isinstance(note.skip, Flow) and not note.skip.name:
            self._skip_tags = [*outer_skip_tags, *_all_tags(note.skip)]
        extra = tuple(self._use(use, stream) for use in note.using)
        end = self._place(note.part, start, extra, note.verb, "" if is_sum else wanted)
        self._skip_tags = outer_skip_tags
        if not is_sum:
            return end
        skip = stream if note.skip is None else self._place(note.skip, stream, (), "skip", "")
        return self._add(Node(self._free_node_name("add"), "add", (skip, end), verb="also"))

    def _place(self, part: Part, start: str, extra: tuple[str, ...], verb: Verb, wanted: str) -> str:
        """Add the node of a part that runs on `start`, or the nodes of a flow without label; returns the last node."""
        if isinstance(part, Flow) and not part.name:
            if extra or part.inputs:
                raise InputError(
                    f"{verb}: a flow with extra inputs ({', '.join(part.inputs) or 'using'}) needs a label: "
                    "flow.label('name')"
                )
            return self.add_flow(part, start)
        target = self._module_name(part, wanted)
        module = self.modules[target]
        if isinstance(module, Graph) and len(module.plan.inputs) != 1 + len(extra):
            expected = ", ".join(module.plan.inputs[1:]) or "none"
            raise InputError(
                f"{verb}: the graph {target!r} takes {len(module.plan.inputs) - 1} extra inputs ({expected}) "
                f"and gets {len(extra)}: pass them with .using(...)"
            )
        return self._add(Node(self._free_node_name(target), "call", (start, *extra), target, verb=verb))

    def _branches(self, note: Branches, stream: str, wanted: str) -> str:
        names = note.tags or [""] * len(note.parts)
        ends = [self._place(part, stream, (), "split", name) for part, name in zip(note.parts, names, strict=True)]
        for name, end in zip(note.tags, ends, strict=False):
            self._tag(name, end)
        if callable(note.merge):
            target = self._module_name(note.merge, wanted)
            return self._add(Node(self._free_node_name(target), "call", tuple(ends), target, verb="merge"))
        return self._add(Node(self._free_node_name(note.merge), note.merge, tuple(ends), dim=note.dim, verb="merge"))

    def _use(self, use: Use, stream: str) -> str:
        """The node of an extra input; a tag that is set only later in the flow is read from the last call."""
        if use.tag in self._skip_tags:
            raise InputError(
                f"using({use.tag!r}): the tag is set in the skip, which runs beside this part, not before it; "
                "tag it before .also_with(skip, part), or swap the two"
            )
        if use.tag in self._tags or self._is_input(use.tag) or use.tag not in self._all_tags:
            node = self._find(use.tag)
            if use.start is not None or not use.detach:
                raise InputError(
                    f"using({use.tag!r}) has start or detach, which are for state across calls, and {use.tag!r} is set "
                    f"before it in the same call: leave them out, or give the state a .using(...) of its own"
                )
            return node
        if use.tag not in self._recalls:
            target = self._unused_module_name(f"memory_{use.tag}")
            self.modules[target] = Memory(use.tag, use.start, use.detach)
            recall = Node(self._free_node_name(f"recall_{use.tag}"), "recall", (stream,), target, verb="using")
            self._recalls[use.tag], self._uses[use.tag] = recall, use
            self._add(recall)
        if self._uses[use.tag] != use:
            raise InputError(
                f"the state {use.tag!r} is used twice with different start or detach: use the same in both"
            )
        return self._recalls[use.tag].name

    def _find(self, tag: str) -> str:
        if tag in self._tags:
            return self._tags[tag]
        if self._is_input(tag):
            return tag
        if tag in self._all_tags:
            raise InputError(f"the tag {tag!r} is set only later in the flow: it has no value here yet")
        known = [*self._tags, *filter(self._is_input, self._nodes)]
        close = get_close_matches(tag, [*known, *self._all_tags], 1)
        hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known) or 'none'}."
        raise InputError(f"unknown tag {tag!r}: {hint} Name a value with .tag({tag!r}), an input with .input({tag!r})")

    def _is_input(self, name: str) -> bool:
        return name != ENTRY and name in self._nodes and self._nodes[name].kind == "input"

    def _tag(self, name: str, node: str) -> None:
        if name in self._tags:
            self._refuse_duplicate(name)
        if self._is_input(name):
            raise InputError(f"the tag {name!r} is also the name of an input: choose another name")
        self._tags[name] = node
        recall = self._recalls.get(name)
        if recall is not None:
            node_name = self._free_node_name(f"remember_{name}")
            self._add(Node(node_name, "remember", (recall.sources[0], node), recall.target, verb="tag"))

    def _refuse_duplicate(self, name: str) -> None:
        raise InputError(
            f"the tag {name!r} is used twice, first for {self._tags[name]!r}: choose another name, "
            "or label a flow that is used twice"
        )

    def _module_name(self, part: Part, wanted: str) -> str:
        """The name of a part's module. The same part has the same module and name everywhere in the graph."""
        if id(part) in self._module_names:
            return self._module_names[id(part)]
        module = to_module(part)
        wanted = (part.name if isinstance(part, Flow) else wanted) or _label(part)
        if wanted in self._tags:
            self._refuse_duplicate(wanted)
        if wanted in self.modules:
            raise InputError(f"two parts have the name {wanted!r}: labels and tags must be unique in a graph")
        name = wanted or self._numbered_name(module)
        self._module_names[id(part)] = name
        self.modules[name] = module
        return name

    def _numbered_name(self, module: nn.Module) -> str:
        kind = (module.name if isinstance(module, Function) else type(module).__name__).lower()
        kind = "".join(letter if letter.isalnum() else "_" for letter in kind)
        return self._unused_module_name(f"{kind}_1", lambda number: f"{kind}_{number}")

    def _unused_module_name(self, name: str, numbered: Callable[[int], str] | None = None) -> str:
        """The name, or a numbered variant of it, that no module has or will have."""
        taken = {*self.modules, *self._all_tags, *self._labels}
        names = map(numbered or (lambda number: f"{name}_{number}"), range(2, len(taken) + 3))
        return name if name not in taken else next(free for free in names if free not in taken)

    def _free_node_name(self, name: str) -> str:
        """The name, or a numbered variant of it, that no node has."""
        if name not in self._nodes:
            return name
        numbered = (f"{name}_{number}" for number in range(2, len(self._nodes) + 3))
        return next(free for free in numbered if free not in self._nodes)

    def _add(self, node: Node) -> str:
        self._nodes[node.name] = node
        return node.name


def to_module(part: Part) -> nn.Module:
    """A part as a module; a mistake in a flow with a label is reported with the label."""
    if not isinstance(part, Flow):
        return part if isinstance(part, nn.Module) else Function(part)
    try:
        return wire(part)
    except InputError as error:
        raise InputError(f"in the flow {part.name!r}: {error}" if part.name else str(error)) from error


def _refuse_unused(plan: Plan, modules: dict[str, nn.Module]) -> None:
    """InputError if a node or an input is used by no output and by no later call."""
    reached: set[str] = set()
    to_visit = [*plan.outputs, *(node.name for node in plan.nodes if node.kind == "remember")]
    while to_visit:
        name = to_visit.pop()
        if name not in reached:
            reached.add(name)
            to_visit.extend(plan.node(name).sources)
    for node in reversed(plan.nodes):
        if node.name in reached:
            continue
        if node.name == ENTRY:
            raise InputError("the input of the flow is not used: let its first part take the stream")
        if node.kind == "input":
            raise InputError(f"the input {node.name!r} is not used: pass it to a part with .using({node.name!r})")
        tag = next(iter(plan.tags_of(node.name)), None)
        what = f"{node.name!r} ({type(modules[node.target]).__name__})" if node.target in modules else repr(node.name)
        name_it = "" if tag else f"tag it, .{node.verb}(...).tag('aside'), and "
        raise InputError(
            f"the branch {what} is not used: {name_it}pass it to a later part with .using({tag or 'aside'!r}), "
            f"return it with .build(outputs=[{tag or 'aside'!r}]), or remove it"
        )
