"""FlowBuilder: a model described as a flow, verb by verb.

A flow has a stream, the value that is passed from verb to verb. Verbs only record notes; `build` checks them and makes
the Graph (wiring.py). A part is a module, a function, or another flow: a flow with a label becomes a sub-graph of that
name, a flow without label is inlined.
"""

import keyword
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, get_args

from torch import Tensor, nn

from uneven.errors import InputError
from uneven.graph.control_flow import WEIGHTINGS, Gate, Loop, Map, Switch, Weighting
from uneven.graph.dryrun import dry_run
from uneven.graph.graph import Graph
from uneven.graph.notes import Branches, Call, Flow, Merge, Part, Tag, Use
from uneven.graph.wiring import made, wire

if TYPE_CHECKING:
    from typing_extensions import Self

MERGES: tuple[Merge, ...] = get_args(Merge)
RESERVED = ("training", "plan", "shapes", "self", "x")  # names in every graph that its class does not show


class FlowBuilder(Flow):
    """A model as a flow of verbs.

    >>> import torch
    >>> from torch import nn
    >>> graph = (
    ...     FlowBuilder.from_(nn.Linear(4, 8)).tag("hidden")
    ...     .through(nn.ReLU())
    ...     .also(nn.Linear(8, 8))
    ...     .through(nn.Linear(8, 2)).tag("scores")
    ...     .build(torch.randn(3, 4))
    ... )
    >>> sorted(graph.state_dict())[:2]
    ['hidden.bias', 'hidden.weight']
    >>> graph(torch.randn(3, 4)).shape
    torch.Size([3, 2])
    """

    def __init__(self, label: str = "") -> None:
        super().__init__()
        if label:
            self.label(label)

    @classmethod
    def from_(cls, part: Part) -> "Self":
        """A flow that starts with a part; `FlowBuilder()` starts with its input as it is."""
        return cls().through(part)

    def through(self, part: Part) -> "Self":
        """The stream goes through a part."""
        return self._call(Call("through", checked(part, "through")))

    def also(self, part: Part) -> "Self":
        """Residual: the stream plus what a part makes of it."""
        return self._call(Call("also", checked(part, "also")))

    def also_with(self, skip: Part, part: Part) -> "Self":
        """Residual with a skip of its own: what `skip` makes of the stream plus what `part` makes of it."""
        return self._call(Call("also", checked(part, "also_with"), checked(skip, "also_with")))

    def fork(self, part: Part) -> "Self":
        """Computed aside; the stream stays as it was. A tag right after it names the result."""
        return self._call(Call("fork", checked(part, "fork")))

    def split(self, parts: Sequence[Part]) -> "Split":
        """Several parts on the same stream; `.merge(...)` makes one stream of their results."""
        return Split(self, _several(parts, "split"))

    def tag(self, name: str) -> "Self":
        """Name the value that was computed last. The module that made it takes the same name."""
        if not self.notes:
            raise InputError(
                f"tag({name!r}) comes before anything was computed: tag the result of a part, or use .input"
            )
        return self._note(Tag(named(name, "tag")), "tag")

    def using(self, *tags: str, start: Callable[[Tensor], Tensor] | None = None, detach: bool = True) -> "Self":
        """Further inputs for the last part: tagged values, or inputs of the graph.

        A tag that is set only later in the flow means its value in the call before (state across calls). In the first
        call, and after `graph.reset_state()`, it is start(stream): zeros like the stream where no start is given.
        `detach=False` lets gradients flow into earlier calls.
        """
        self._refuse_if_placed("using")
        last = next((note for note in reversed(self.notes) if not isinstance(note, Tag)), None)
        if not isinstance(last, Call):
            raise InputError(f"using{tags} has no part to give them to: it follows through, also, fork, loop, ...")
        last.using.extend(Use(named(tag, "using"), start, detach) for tag in tags)
        return self

    def input(self, *names: str) -> "Self":
        """Further inputs of the graph: forward takes them after the stream, by place or by name."""
        self._refuse_if_placed("input")
        for name in names:
            if not (isinstance(name, str) and name.isidentifier()) or name in (*self.inputs, "x", "torch"):
                raise InputError(f"input {name!r} must be a name of its own, such as 'mask' ('x' is the stream)")
            named(name, "input")
        self.inputs.extend(names)
        return self

    def loop(self, body: Part) -> "LoopVerb":
        """A body applied to its own result: `.for_n(3)`, `.while_(condition)` or `.until(condition)`."""
        return LoopVerb(self, as_module(body, "loop"))

    def gate(self, router: Part, experts: Sequence[Part], weighting: Weighting = "softmax") -> "Self":
        """A soft mixture: all experts run, the router's scores weight their results."""
        if weighting not in WEIGHTINGS:
            raise InputError(f"gate(weighting={weighting!r}) must be one of {', '.join(WEIGHTINGS)}")
        parts = [as_module(expert, "gate") for expert in _several(experts, "gate")]
        return self._call(Call("gate", Gate(as_module(router, "gate"), parts, weighting)))

    def switch(self, selector: Part, branches: Sequence[Part]) -> "Self":
        """Hard routing: the selector says which branch a sample (or the whole batch) takes."""
        parts = [as_module(branch, "switch") for branch in _several(branches, "switch")]
        return self._call(Call("switch", Switch(as_module(selector, "switch"), parts)))

    def map(self, body: Part) -> "MapVerb":
        """One body for many elements: `.each()`, `.over(tag)` or `.slices(n)`, after `.batched()` in one go."""
        return MapVerb(self, as_module(body, "map"))

    def label(self, name: str) -> "Self":
        """Name the flow: as a part of another it becomes a sub-graph under this name."""
        self._refuse_if_placed("label")
        self.name = named(name, "label")
        return self

    def build(self, *example: Any, outputs: Sequence[str] = ()) -> Graph:
        """Check the flow and make its graph.

        With an example of its inputs the graph runs once, in eval mode, and a shape mismatch is reported with its node.
        With `outputs` forward returns a tuple: the stream's end, then these tagged values.
        """
        if isinstance(outputs, str):
            raise InputError(f"outputs={outputs!r} must be a list of tags, as in outputs=[{outputs!r}]")
        graph = wire(self, tuple(outputs))
        if example:
            dry_run(graph, example)
        return graph

    def _call(self, call: Call) -> "Self":
        return self._note(call, call.verb)

    def _note(self, note: Call | Branches | Tag, verb: str) -> "Self":
        self._refuse_if_placed(verb)
        self.notes.append(note)
        return self

    def _refuse_if_placed(self, verb: str) -> None:
        """A flow must not change after another flow has taken it as a part."""
        if self.is_placed:
            raise InputError(f"{verb}: this flow is already a part of another flow; complete it first")


class _Open:
    """A verb that is not complete: only what closes it may follow."""

    _verb = ""
    _closing = ""

    def __init__(self, flow: FlowBuilder) -> None:
        self._flow = flow

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise InputError(f"{self._verb} is not complete when .{name} follows: close it by {self._closing}")


class Split(_Open):
    """Open branches."""

    _verb = "split([...])"
    _closing = ".merge('add'), .merge('mean'), .merge('cat') or .merge(function)"

    def __init__(self, flow: FlowBuilder, parts: list[Part]) -> None:
        super().__init__(flow)
        self._branches = Branches(parts)

    def tag(self, *names: str) -> "Split":
        """Name the branches' results, one name each."""
        if len(names) != len(self._branches.parts):
            raise InputError(f"{len(names)} tags for {len(self._branches.parts)} branches: give one name each")
        self._branches.tags = [named(name, "tag") for name in names]
        return self

    def merge(self, how: Merge | Callable[..., Any], dim: int = 1) -> FlowBuilder:
        """Make one stream of the branches: "add", "mean", "cat" along `dim`, or a function of all of them."""
        if not callable(how) and how not in MERGES:
            raise InputError(
                f"merge({how!r}) must be one of {', '.join(MERGES)}, or a function of the branches' results"
            )
        self._branches.merge, self._branches.dim = how, dim
        return self._flow._note(self._branches, "merge")


class LoopVerb(_Open):
    """A loop whose number of passes is not given yet."""

    _verb = "loop(body)"
    _closing = ".for_n(n), .while_(condition) or .until(condition)"

    def __init__(self, flow: FlowBuilder, body: nn.Module) -> None:
        super().__init__(flow)
        self._body = body

    def for_n(self, times: int) -> FlowBuilder:
        """So many passes."""
        return self._flow._call(Call("loop", Loop(self._body, counted(times, "for_n"))))

    def while_(self, condition: Part, most: int = 100) -> FlowBuilder:
        """Passes as long as condition(value) holds; perhaps none."""
        return self._conditional(condition, most, is_until=False)

    def until(self, condition: Part, most: int = 100) -> FlowBuilder:
        """Passes until condition(value) holds; at least one."""
        return self._conditional(condition, most, is_until=True)

    def _conditional(self, condition: Part, most: int, is_until: bool) -> FlowBuilder:
        halt = as_module(condition, "loop")
        loop = Loop(self._body, condition=halt, is_until=is_until, most=counted(most, "most"))
        return self._flow._call(Call("loop", loop))


class MapVerb(_Open):
    """A map whose elements are not given yet."""

    _verb = "map(body)"
    _closing = ".each(), .over(tag) or .slices(n)"

    def __init__(self, flow: FlowBuilder, body: nn.Module, is_batched: bool = False) -> None:
        super().__init__(flow)
        self._body = body
        self._is_batched = is_batched

    def batched(self) -> "MapVerb":
        """Fold the elements into the batch, so that the body runs once."""
        return MapVerb(self._flow, self._body, True)

    def each(self, dim: int = 1) -> FlowBuilder:
        """Every element of the stream along a dimension."""
        return self._flow._call(Call("map", Map(self._body, dim, None, self._is_batched)))

    def over(self, tag: str, dim: int = 1) -> FlowBuilder:
        """Every element of a tagged value; the results become the stream."""
        part = Map(self._body, dim, None, self._is_batched)
        return self._flow._call(Call("map", part, over=named(tag, "over")))

    def slices(self, many: int, dim: int = -1) -> FlowBuilder:
        """So many equal slices of the stream along a dimension."""
        return self._flow._call(Call("map", Map(self._body, dim, counted(many, "slices"), self._is_batched)))


def checked(part: Part, verb: str) -> Part:
    if isinstance(part, _Open):
        raise InputError(f"{verb}: its part is a flow with an open {part._verb}: close it by {part._closing}")
    owner = getattr(part, "__self__", None)
    if isinstance(owner, nn.Module):
        raise InputError(f"{verb}: a method of {type(owner).__name__} hides its params; pass the module itself")
    if isinstance(part, Flow):
        part.is_placed = True
    if isinstance(part, type) or not (isinstance(part, nn.Module | Flow) or callable(part)):
        hint = f"; make one: {part.__name__}(...)" if isinstance(part, type) else ""
        raise InputError(f"{verb}({part!r}): a part is a module, a function or a flow{hint}")
    return part


def as_module(part: Part, verb: str) -> nn.Module:
    """A part as a module of its own, for verbs that decide by themselves when it runs."""
    return made(checked(part, verb))


def named(name: str, verb: str) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][\w-]*", name) or keyword.iskeyword(name):
        raise InputError(f"{verb}({name!r}): a name is a word of letters, digits, - and _, and none of Python's own")
    if hasattr(Graph, name) or name in RESERVED:
        raise InputError(f"{verb}({name!r}): a graph has an attribute of that name; choose another")
    return name


def counted(many: int, what: str) -> int:
    if not isinstance(many, int) or isinstance(many, bool) or many < 1:
        raise InputError(f"{what}({many!r}) must be a whole number of at least 1")
    return many


def _several(parts: Sequence[Part], verb: str) -> list[Part]:
    if not isinstance(parts, Sequence | nn.ModuleList) or not len(parts):
        raise InputError(f"{verb} takes a list of parts, as in {verb}([a, b]), and this is {parts!r}")
    return [checked(part, verb) for part in parts]
