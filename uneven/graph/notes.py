"""What FlowBuilder records: notes, one per verb, which wiring.py turns into a plan."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Union

from torch import Tensor, nn

from uneven.graph.plan import Verb

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
