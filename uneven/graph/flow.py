"""FlowBuilder: a model described as a flow of verbs, which are its methods.

A flow has a stream, the value that is passed from verb to verb. Verbs only record notes; `build` checks them and makes
the Graph (wiring.py). A part is a module, a function or another flow. A flow with a label becomes a sub-graph of that
name; a flow without label is inlined.
"""

import keyword
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, get_args

from torch import Tensor, nn

from uneven.errors import InputError
from uneven.graph.control_flow import WEIGHTINGS, Gate, Loop, Map, Switch, Weighting
from uneven.graph.function import refuse_hidden_params
from uneven.graph.graph import Graph
from uneven.graph.observe import dry_run
from uneven.graph.wiring import Branches, Call, Flow, Merge, Part, Tag, Use, to_module, wire

if TYPE_CHECKING:
    from typing_extensions import Self

MERGES: tuple[Merge, ...] = get_args(Merge)
RESERVED = ("training", "plan", "shapes", "self", "x")  # names in a graph that are not attributes of its class

TAKEN = ("x", "torch", "getattr")  # names that the source of forward uses itself, of which inputs are arguments


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
        if label != "":
            self.label(label)

    @classmethod
    def from_(cls, part: Part) -> "Self":
        """A flow that starts with a part; `FlowBuilder()` starts with its unchanged input."""
        return cls().through(part)

    def through(self, part: Part) -> "Self":
        """Pass the stream through a part."""
        return self._call(Call("through", checked(part, "through")))

    def also(self, part: Part) -> "Self":
        """A residual connection: the stream plus the part's result."""
        return self._call(Call("also", checked(part, "also")))

    def also_with(self, skip: Part, part: Part) -> "Self":
        """A residual connection with a part in the skip: skip(stream) + part(stream)."""
        return self._call(Call("also", checked(part, "also_with"), checked(skip, "also_with")))

    def fork(self, part: Part) -> "Self":
        """Compute a part beside the stream, which does not change. A tag right after it names the result."""
        return self._call(Call("fork", checked(part, "fork")))

    def split(self, parts: Sequence[Part]) -> "Split":
        """Run several parts on the same stream; `.merge(...)` makes one stream of their results."""
        return Split(self, _checked_list(parts, "split"))

    def tag(self, name: str) -> "Self":
        """Name the value that was computed last. The module that computed it gets the same name."""
        if not self.notes:
            raise InputError(f"tag({name!r}) comes before the first part: tag the result of a part, or use .input")
        return self._append(Tag(checked_name(name, "tag")), "tag")

    def using(self, *tags: str, start: Callable[[Tensor], Tensor] | None = None, detach: bool = True) -> "Self":
        """Extra inputs for the last part: tagged values, or inputs of the graph.

        A tag that is set only later in the flow means its value in the last call (state across calls). In the first
        call, and after `graph.reset_state()`, it is start(stream), or zeros like the stream without `start`.
        `detach=False` lets gradients flow into earlier calls.
        """
        self._refuse_if_placed("using")
        if start is not None and not callable(start):
            raise InputError(f"using(start={start!r}) must be a function of the stream, such as torch.ones_like")
        if not isinstance(detach, bool):
            raise InputError(f"using(detach={detach!r}) must be True or False")
        last = next((note for note in reversed(self.notes) if not isinstance(note, Tag)), None)
        if not isinstance(last, Call):
            raise InputError(f"using{tags} must follow a part that takes the values: through, also, fork, loop, ...")
        last.using.extend(Use(checked_name(tag, "using"), start, detach) for tag in tags)
        return self

    def input(self, *names: str) -> "Self":
        """Extra inputs of the graph: forward takes them after the stream, by position or by name."""
        self._refuse_if_placed("input")
        for name in names:
            if not (isinstance(name, str) and name.isidentifier()) or name in (*self.inputs, *TAKEN):
                raise InputError(
                    f"input({name!r}) must be a new identifier, such as 'mask' ('x' is the stream), and not "
                    f"{' or '.join(map(repr, TAKEN[1:]))}"
                )
            checked_name(name, "input")
        self.inputs.extend(names)
        return self

    def loop(self, body: Part) -> "LoopVerb":
        """A body applied to its own result: `.for_n(3)`, `.while_(condition)` or `.until(condition)`."""
        return LoopVerb(self, as_module(body, "loop"))

    def gate(self, router: Part, experts: Sequence[Part], weighting: Weighting = "softmax") -> "Self":
        """A soft mixture of experts: all experts run, and the router's scores weight their results."""
        if weighting not in WEIGHTINGS:
            raise InputError(f"gate(weighting={weighting!r}) must be one of {', '.join(WEIGHTINGS)}")
        parts = [as_module(expert, "gate") for expert in _checked_list(experts, "gate")]
        return self._call(Call("gate", Gate(as_module(router, "gate"), parts, weighting)))

    def switch(self, selector: Part, branches: Sequence[Part]) -> "Self":
        """Hard routing: the selector chooses the branch of each sample, or of the whole batch."""
        parts = [as_module(branch, "switch") for branch in _checked_list(branches, "switch")]
        return self._call(Call("switch", Switch(as_module(selector, "switch"), parts)))

    def map(self, body: Part) -> "MapVerb":
        """One body for many elements: `.each()`, `.over(tag)` or `.slices(n)`; after `.batched()` it runs only once."""
        return MapVerb(self, as_module(body, "map"))

    def label(self, name: str) -> "Self":
        """Name the flow: as a part of another flow it becomes a sub-graph of this name."""
        self._refuse_if_placed("label")
        self.name = checked_name(name, "label")
        return self

    def build(self, *example: Any, outputs: Sequence[str] = ()) -> Graph:
        """Check the flow and make its graph.

        With an example of its inputs the graph runs once, in eval mode, and a shape mismatch is reported with its node.
        With `outputs`, forward returns a tuple: the end of the stream, then these tagged values.
        """
        if not isinstance(outputs, list | tuple) or not all(isinstance(tag, str) for tag in outputs):
            example_tag = outputs if isinstance(outputs, str) else "scores"
            raise InputError(f"outputs={outputs!r} must be a list of tags, as in outputs=[{example_tag!r}]")
        graph = wire(self, tuple(outputs))
        refuse_hidden_params(graph)
        if example:
            dry_run(graph, example)
        return graph

    def _call(self, call: Call) -> "Self":
        return self._append(call, call.verb)

    def _append(self, note: Call | Branches | Tag, verb: str) -> "Self":
        self._refuse_if_placed(verb)
        self.notes.append(note)
        return self

    def _refuse_if_placed(self, verb: str) -> None:
        """InputError if another flow has this flow as a part, which must not change any more."""
        if self.is_placed:
            raise InputError(f"{verb}: this flow is already a part of another flow; complete it first")


class _Incomplete:
    """A verb that needs a second call: any other attribute raises InputError with the calls that complete it."""

    _verb = ""
    _closing = ""

    def __init__(self, flow: FlowBuilder) -> None:
        self._flow = flow

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise InputError(f"{self._verb} is not complete when .{name} follows: complete it with {self._closing}")


class Split(_Incomplete):
    """Branches that are not merged yet."""

    _verb = "split([...])"
    _closing = ".merge('add'), .merge('mean'), .merge('cat') or .merge(function)"

    def __init__(self, flow: FlowBuilder, parts: list[Part]) -> None:
        super().__init__(flow)
        self._branches = Branches(parts)

    def tag(self, *names: str) -> "Split":
        """Name the branches' results, one name each."""
        if len(names) != len(self._branches.parts):
            raise InputError(f"{len(names)} tags for {len(self._branches.parts)} branches: give one name each")
        self._branches.tags = [checked_name(name, "tag") for name in names]
        return self

    def merge(self, how: Merge | Callable[..., Any], dim: int | None = None) -> FlowBuilder:
        """Merge the branches into one stream: "add", "mean", "cat" along `dim` (1), or a function of all results."""
        if not callable(how) and how not in MERGES:
            raise InputError(
                f"merge({how!r}) must be one of {', '.join(MERGES)}, or a function of the branches' results"
            )
        if dim is not None and how != "cat":
            raise InputError(f"merge(..., dim={dim!r}) belongs to 'cat'; here it would be ignored: leave it out")
        if callable(how):
            checked(how, "merge")
        self._branches.merge = how
        self._branches.dim = 1 if dim is None else checked_dim(dim, "merge")
        return self._flow._append(self._branches, "merge")


class LoopVerb(_Incomplete):
    """A loop whose number of passes is not given yet."""

    _verb = "loop(body)"
    _closing = ".for_n(n), .while_(condition) or .until(condition)"

    def __init__(self, flow: FlowBuilder, body: nn.Module) -> None:
        super().__init__(flow)
        self._body = body

    def for_n(self, times: int) -> FlowBuilder:
        """A fixed number of passes."""
        return self._flow._call(Call("loop", Loop(self._body, checked_count(times, "for_n"))))

    def while_(self, condition: Part, most: int = 100) -> FlowBuilder:
        """Passes as long as condition(value) holds, possibly none."""
        return self._conditional(condition, most, is_until=False)

    def until(self, condition: Part, most: int = 100) -> FlowBuilder:
        """Passes until condition(value) holds, at least one."""
        return self._conditional(condition, most, is_until=True)

    def _conditional(self, condition: Part, most: int, is_until: bool) -> FlowBuilder:
        module = as_module(condition, "loop")
        loop = Loop(self._body, condition=module, is_until=is_until, most=checked_count(most, "most"))
        return self._flow._call(Call("loop", loop))


class MapVerb(_Incomplete):
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
        """Apply the body to every element of the stream along `dim`."""
        return self._flow._call(Call("map", Map(self._body, checked_dim(dim, "each"), None, self._is_batched)))

    def over(self, tag: str, dim: int = 1) -> FlowBuilder:
        """Apply the body to every element of a tagged value along `dim`; the results become the stream."""
        part = Map(self._body, checked_dim(dim, "over"), None, self._is_batched)
        return self._flow._call(Call("map", part, over=checked_name(tag, "over")))

    def slices(self, many: int, dim: int = -1) -> FlowBuilder:
        """Apply the body to `many` equal slices of the stream along `dim`."""
        part = Map(self._body, checked_dim(dim, "slices"), checked_count(many, "slices"), self._is_batched)
        return self._flow._call(Call("map", part))


def checked(part: Part, verb: str) -> Part:
    """The part itself; InputError if it is not a module, a function or a complete flow."""
    if isinstance(part, _Incomplete):
        raise InputError(
            f"{verb}: the part is a flow with an incomplete {part._verb}: complete it with {part._closing}"
        )
    owner = getattr(part, "__self__", None)
    if isinstance(owner, nn.Module):
        raise InputError(f"{verb}: a method of {type(owner).__name__} hides its params; pass the module itself")
    if isinstance(part, Flow):
        part.is_placed = True
    if isinstance(part, type) or not (isinstance(part, nn.Module | Flow) or callable(part)):
        hint = f"; make an instance: {part.__name__}(...)" if isinstance(part, type) else ""
        raise InputError(f"{verb}({part!r}): a part must be a module, a function or a flow{hint}")
    return part


def as_module(part: Part, verb: str) -> nn.Module:
    """A part as a module, for the verbs with control flow, which decide when it runs."""
    return to_module(checked(part, verb))


def checked_name(name: str, verb: str) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][\w-]*", name) or keyword.iskeyword(name):
        raise InputError(f"{verb}({name!r}): a name consists of letters, digits, - and _, and is not a Python keyword")
    if hasattr(Graph, name) or name in RESERVED:
        raise InputError(f"{verb}({name!r}): a graph has an attribute of this name; choose another name")
    return name


def checked_dim(dim: int, verb: str) -> int:
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise InputError(f"{verb}(dim={dim!r}) must be an integer")
    return dim


def checked_count(count: int, argument: str) -> int:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise InputError(f"{argument}({count!r}) must be an integer of at least 1")
    return count


def _checked_list(parts: Sequence[Part], verb: str) -> list[Part]:
    if not isinstance(parts, Sequence | nn.ModuleList) or not len(parts):
        raise InputError(f"{verb} takes a list of parts, as in {verb}([a, b]); got {parts!r}")
    return [checked(part, verb) for part in parts]
