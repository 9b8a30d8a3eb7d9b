"""What a FlowBuilder writes down: the notes that wiring.py turns into a plan."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Union

from torch import Tensor, nn

Merge = Literal["add", "mean", "cat"]
Part = Union[nn.Module, Callable[..., Any], "Flow"]


@dataclass(frozen=True)
class Use:
    """A tagged value as a further input; how it starts and goes on counts only for state across calls."""

    tag: str
    start: Callable[[Tensor], Tensor] | None = None
    detach: bool = True


@dataclass
class Call:
    """A part that runs: on the stream (through), beside it with the sum of both (also), or aside (fork)."""

    verb: str
    part: Part
    skip: Part | None = None
    over: str | None = None  # the tag that takes the stream's place
    using: list[Use] = field(default_factory=list)


@dataclass
class Branches:
    """Parts that run on the same stream, and how their results become one again."""

    parts: list[Part]
    tags: list[str] = field(default_factory=list)
    merge: Merge | Callable[..., Any] = "add"  # set by `.merge(...)`
    dim: int = 1


@dataclass(frozen=True)
class Tag:
    name: str


class Flow:
    """Notes in the order of the verbs; with a name it is a graph of its own, without one it is drawn in."""

    def __init__(self) -> None:
        self.notes: list[Call | Branches | Tag] = []
        self.inputs: list[str] = []
        self.name = ""
        self.is_placed = False  # a part of another flow, and so complete
