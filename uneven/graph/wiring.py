"""From a flow's notes to a plan: every value gets a node, every module a name, every tag its place.

Faults are reported here with the node and the fix: unknown tags, names given twice, results that are not used.
"""

from collections.abc import Callable, Iterator
from difflib import get_close_matches

from torch import nn

from uneven.errors import InputError
from uneven.graph.function import Function
from uneven.graph.graph import Graph
from uneven.graph.memory import Memory
from uneven.graph.notes import Branches, Call, Flow, Part, Tag, Use
from uneven.graph.plan import ENTRY, Node, Plan


def wire(flow: Flow, outputs: tuple[str, ...] = ()) -> Graph:
    """The graph of a flow; InputError where it has a fault."""
    if not flow.notes:
        raise InputError("the flow is empty: give it a part, as in FlowBuilder.from_(nn.Linear(4, 2)).build()")
    wiring = _Wiring(flow)
    end = wiring.lay(flow, ENTRY)
    plan = wiring.plan(end, outputs)
    _refuse_unused(plan, wiring.modules)
    return Graph(plan, wiring.modules)


def _all_tags(flow: Flow) -> Iterator[str]:
    """Every tag in the flow and in the flows drawn into it."""
    for note in flow.notes:
        if isinstance(note, Tag):
            yield note.name
        if isinstance(note, Branches):
            yield from note.tags
        for part in _parts(note):
            if isinstance(part, Flow) and not part.name:
                yield from _all_tags(part)


def _all_labels(flow: Flow) -> Iterator[str]:
    """The names that flows with a label, and graphs, will have in it."""
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
    """The growing plan of one graph."""

    def __init__(self, flow: Flow) -> None:
        self.modules: dict[str, nn.Module] = {}
        self._label = flow.name
        self._nodes = {name: Node(name, "input") for name in (ENTRY, *flow.inputs)}
        self._tags: dict[str, str] = {}
        self._coming = list(_all_tags(flow))
        self._labels = set(_all_labels(flow))
        self._recalls: dict[str, Node] = {}  # tag -> where its value in the call before comes in
        self._uses: dict[str, Use] = {}  # the same, as they were asked for
        self._beside: list[str] = []  # tags of a skip, while the part beside it is laid
        self._homes: dict[int, str] = {}  # id of a part -> the name of its module
        self._last = ENTRY

    def plan(self, end: str, outputs: tuple[str, ...]) -> Plan:
        return Plan(self._label, tuple(self._nodes.values()), (end, *map(self._find, outputs)), dict(self._tags))

    def lay(self, flow: Flow, stream: str) -> str:
        """Lay the notes of a flow from this node on; returns where its stream ends."""
        for place, note in enumerate(flow.notes):
            following = flow.notes[place + 1] if place + 1 < len(flow.notes) else None
            wanted = following.name if isinstance(following, Tag) else ""
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
        before = self._beside
        if isinstance(note.skip, Flow) and not note.skip.name:
            self._beside = [*before, *_all_tags(note.skip)]
        further = tuple(self._use(use, stream) for use in note.using)
        end = self._place(note.part, start, further, note.verb, "" if is_sum else wanted)
        self._beside = before
        if not is_sum:
            return end
        beside = stream if note.skip is None else self._place(note.skip, stream, (), "skip", "")
        return self._add(Node(self._free("add"), "add", (beside, end), verb="also"))

    def _place(self, part: Part, start: str, further: tuple[str, ...], verb: str, wanted: str) -> str:
        """A node for a part that runs on `start`; a flow without a label is laid here instead."""
        if isinstance(part, Flow) and not part.name:
            if further or part.inputs:
                raise InputError(
                    f"{verb}: a flow that takes further inputs ({', '.join(part.inputs) or 'using'}) needs a label: "
                    "flow.label('name')"
                )
            return self.lay(part, start)
        target = self._home(part, wanted)
        module = self.modules[target]
        if isinstance(module, Graph) and len(module.plan.inputs) != 1 + len(further):
            wants = ", ".join(module.plan.inputs[1:]) or "none"
            raise InputError(
                f"{verb}: the graph {target!r} takes {len(module.plan.inputs) - 1} further inputs ({wants}) "
                f"and is given {len(further)}: name them by .using(...)"
            )
        return self._add(Node(self._free(target), "call", (start, *further), target, verb=verb))

    def _branches(self, note: Branches, stream: str, wanted: str) -> str:
        names = note.tags or [""] * len(note.parts)
        ends = [self._place(part, stream, (), "split", name) for part, name in zip(note.parts, names, strict=True)]
        for name, end in zip(note.tags, ends, strict=False):
            self._tag(name, end)
        if callable(note.merge):
            target = self._home(note.merge, wanted)
            return self._add(Node(self._free(target), "call", tuple(ends), target, verb="merge"))
        return self._add(Node(self._free(note.merge), note.merge, tuple(ends), dim=note.dim, verb="merge"))

    def _use(self, use: Use, stream: str) -> str:
        """The node of a further input; a tag that only comes later is what the last call left."""
        if use.tag in self._beside:
            raise InputError(
                f"using({use.tag!r}): the tag is set in the skip, which runs beside this part and not before it; "
                "tag it before .also_with(skip, part), or swap the two"
            )
        if use.tag in self._tags or self._is_input(use.tag) or use.tag not in self._coming:
            return self._find(use.tag)
        if use.tag not in self._recalls:
            target = self._unused(f"memory_{use.tag}")
            self.modules[target] = Memory(use.tag, use.start, use.detach)
            node = Node(self._free(f"recall_{use.tag}"), "recall", (stream,), target, verb="using")
            self._recalls[use.tag], self._uses[use.tag] = node, use
            self._add(node)
        if self._uses[use.tag] != use:
            raise InputError(
                f"the state {use.tag!r} is used twice with different start or detach: say the same in both"
            )
        return self._recalls[use.tag].name

    def _find(self, tag: str) -> str:
        if tag in self._tags:
            return self._tags[tag]
        if self._is_input(tag):
            return tag
        if tag in self._coming:
            raise InputError(f"the tag {tag!r} is set only later in the flow: here it has no value of this call yet")
        known = [*self._tags, *filter(self._is_input, self._nodes)]
        close = get_close_matches(tag, [*known, *self._coming], 1)
        hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known) or 'none'}."
        raise InputError(f"unknown tag {tag!r}: {hint} A value is named by .tag({tag!r}), an input by .input({tag!r})")

    def _is_input(self, name: str) -> bool:
        return name != ENTRY and name in self._nodes and self._nodes[name].kind == "input"

    def _tag(self, name: str, node: str) -> None:
        if name in self._tags:
            self._refuse_second(name)
        if self._is_input(name):
            raise InputError(f"the tag {name!r} is the name of an input, too: choose another")
        self._tags[name] = node
        recall = self._recalls.get(name)
        if recall is not None:
            place = self._free(f"remember_{name}")
            self._add(Node(place, "remember", (recall.sources[0], node), recall.target, verb="tag"))

    def _refuse_second(self, name: str) -> None:
        raise InputError(
            f"the tag {name!r} is given twice, first to {self._tags[name]!r}: choose another name, "
            "or label a flow that is used twice"
        )

    def _home(self, part: Part, wanted: str) -> str:
        """The name of a part's module: the same one where the same part stands again."""
        if id(part) in self._homes:
            return self._homes[id(part)]
        module = made(part)
        wanted = (part.name if isinstance(part, Flow) else wanted) or _label(part)
        if wanted in self._tags:
            self._refuse_second(wanted)
        if wanted in self.modules:
            raise InputError(f"two parts are named {wanted!r}: labels and tags must differ within a graph")
        name = wanted or self._numbered(module)
        self._homes[id(part)] = name
        self.modules[name] = module
        return name

    def _numbered(self, module: nn.Module) -> str:
        kind = (module.name if isinstance(module, Function) else type(module).__name__).lower()
        kind = "".join(letter if letter.isalnum() else "_" for letter in kind)
        return self._unused(f"{kind}_1", lambda many: f"{kind}_{many}")

    def _unused(self, name: str, numbered: Callable[[int], str] | None = None) -> str:
        """A name that no module has or will have."""
        taken = {*self.modules, *self._coming, *self._labels}
        names = map(numbered or (lambda many: f"{name}_{many}"), range(2, len(taken) + 3))
        return name if name not in taken else next(free for free in names if free not in taken)

    def _free(self, name: str) -> str:
        """A node name close to this one."""
        if name not in self._nodes:
            return name
        return next(f"{name}_{many}" for many in range(2, len(self._nodes) + 3) if f"{name}_{many}" not in self._nodes)

    def _add(self, node: Node) -> str:
        self._nodes[node.name] = node
        return node.name


def made(part: Part) -> nn.Module:
    """A part as a module of its own; a fault in a flow with a label is reported with the label."""
    if not isinstance(part, Flow):
        return part if isinstance(part, nn.Module) else Function(part)
    try:
        return wire(part)
    except InputError as error:
        raise InputError(f"in the flow {part.name!r}: {error}" if part.name else str(error)) from error


def _refuse_unused(plan: Plan, modules: dict[str, nn.Module]) -> None:
    """InputError where something is computed, or asked for, that reaches no output and no later call."""
    reached: set[str] = set()
    ends = [*plan.outputs, *(node.name for node in plan.nodes if node.kind == "remember")]
    while ends:
        name = ends.pop()
        if name not in reached:
            reached.add(name)
            ends.extend(plan.node(name).sources)
    for node in reversed(plan.nodes):
        if node.name in reached:
            continue
        if node.name == ENTRY:
            raise InputError("nothing uses the flow's own input: let its first part take the stream")
        if node.kind == "input":
            raise InputError(f"nothing uses the input {node.name!r}: give it to a part by .using({node.name!r})")
        tag = next(iter(plan.tags_of(node.name)), None)
        what = f"{node.name!r} ({type(modules[node.target]).__name__})" if node.target in modules else repr(node.name)
        name_it = "" if tag else f"tag it, .{node.verb}(...).tag('aside'), and "
        raise InputError(
            f"nobody uses the branch {what}: {name_it}give it to a later part by .using({tag or 'aside'!r}), "
            f"return it by .build(outputs=[{tag or 'aside'!r}]), or leave it out"
        )
