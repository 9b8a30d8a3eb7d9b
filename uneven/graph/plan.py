"""The plan of a graph: its nodes in the order of execution. Plain data, so it can be pickled, compared and drawn."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

NodeKind = Literal["input", "call", "add", "mean", "cat", "recall", "remember"]
ENTRY = "x"  # the node where the stream enters, and forward's first argument


@dataclass(frozen=True)
class Node:
    """One value of the graph and how it is made from others.

    `kind` is "input", "call" (of the module `target`), "add", "mean", "cat" (along `dim`), "recall" (what `target`
    remembers of the last call) or "remember" (for the next one).
    """

    name: str  # unique in its graph
    kind: NodeKind
    sources: tuple[str, ...] = ()
    target: str = ""
    dim: int = 0
    verb: str = ""  # of the builder, for pictures and messages


@dataclass(frozen=True)
class Plan:
    """Nodes such that every source stands before its user (state across calls goes through "recall")."""

    label: str
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]  # the stream's end first
    tags: dict[str, str] = field(default_factory=dict)  # tag -> node

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.nodes if node.kind == "input")

    @cached_property
    def _by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    def node(self, name: str) -> Node:
        return self._by_name[name]

    def tags_of(self, name: str) -> tuple[str, ...]:
        return tuple(tag for tag, node in self.tags.items() if node == name)
