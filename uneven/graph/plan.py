"""The plan of a graph, and PlanModule, the nn.Module that runs a plan as fx.GraphModule runs an fx graph.

A plan is the list of nodes in the order of execution: plain data that can be pickled, compared and drawn. wiring.py
makes plans. Everything that reads a graph (describe, observe, profile, drawing) works on PlanModule; the
class that users see, Graph, is derived from it and offers them as methods.
"""

import hashlib
import linecache
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, reduce
from types import MethodType
from typing import Any, Literal

import torch
from torch import fx, nn

from uneven.graph.memory import Memory

NodeKind = Literal["input", "call", "add", "mean", "cat", "recall", "remember"]
Verb = Literal["", "through", "also", "skip", "fork", "split", "merge", "loop", "gate", "switch", "map", "using", "tag"]
ENTRY = "x"  # the node of the stream's input, and the first argument of forward


@dataclass(frozen=True)
class Node:
    """One value of the graph and how it is computed from others.

    `kind` is "input", "call" (of the module `target`), "add", "mean", "cat" (along `dim`), "recall" (read the value
    that the Memory `target` stored in the last call) or "remember" (store a value in it for the next call).
    """

    name: str  # unique in its graph
    kind: NodeKind
    sources: tuple[str, ...] = ()
    target: str = ""
    dim: int = 0
    verb: Verb = ""  # the builder's method that made the node, for drawings and messages


@dataclass(frozen=True)
class Plan:
    """Nodes in topological order: every source comes before its users. State across calls goes through "recall"."""

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


class PlanModule(nn.Module):
    """A plan and the modules that it calls, which are ordinary child modules.

    Invariant: the plan and the children define the module. The fx graph and `forward` are derived from them and are
    recompiled in every copy, so they are never pickled.
    """

    def __init__(self, plan: Plan, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.plan = plan
        self.shapes: dict[str, tuple[int, ...]] = {}  # of the nodes' values, recorded by `build` with an example
        for name, module in modules.items():
            self.add_module(name, module)
        self._compile_plan()

    @property
    def fx(self) -> fx.Graph:
        """The computation as a torch.fx graph; `fx.GraphModule(graph, graph.fx)` passes it to fx tools."""
        return self._fx

    @property
    def code(self) -> str:
        """The Python source of forward."""
        return self._fx.python_code("self").src

    def reset_state(self) -> None:
        """Clear the state across calls, here and in sub-graphs."""
        for module in self.modules():
            if isinstance(module, Memory):
                module.reset()

    def extra_repr(self) -> str:
        return self.plan.label

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_fx", "forward")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._compile_plan()

    def _compile_plan(self) -> None:
        """Make the fx graph of the plan, and compile it into this module's forward."""
        self._fx = to_fx(self.plan)
        # An attribute of the instance, so that inspect sees its signature and torch.compile tells graphs apart by code.
        self.__dict__["forward"] = MethodType(_forward_of(self._fx, self.plan.label), self)


def to_fx(plan: Plan) -> fx.Graph:
    """The fx graph of a plan. A node becomes one or a few fx nodes, which have its name in `meta["node"]`."""
    graph = fx.Graph()
    values: dict[str, fx.Node] = {}
    for node in plan.nodes:
        values[node.name] = _append(graph, node, [values[source] for source in node.sources])
        for fx_node in reversed(graph.nodes):
            if "node" in fx_node.meta:
                break
            fx_node.meta["node"] = node.name
    outputs = tuple(values[name] for name in plan.outputs)
    graph.output(outputs if len(outputs) > 1 else outputs[0])
    return graph


def _append(graph: fx.Graph, node: Node, sources: list[fx.Node]) -> fx.Node:
    if node.kind == "input":
        return graph.placeholder(node.name)
    if node.kind in ("call", "recall", "remember"):
        return graph.call_module(node.target, tuple(sources))
    if node.kind == "cat":
        return graph.call_function(torch.cat, (sources, node.dim))
    total = reduce(lambda left, right: graph.call_function(operator.add, (left, right)), sources)
    if node.kind == "add":
        return total
    assert node.kind == "mean", node.kind
    return graph.call_function(operator.truediv, (total, len(sources)))


_FORWARDS: dict[str, Any] = {}  # source -> compiled function


def _forward_of(graph: fx.Graph, label: str) -> Any:
    """The forward of an fx graph. Graphs with the same code share it, as instances of a class share its methods."""
    code = graph.python_code("self")
    if code.src not in _FORWARDS:
        file = f"<graph {label or 'without label'} {hashlib.sha256(code.src.encode()).hexdigest()[:8]}>"
        linecache.cache[file] = (len(code.src), None, code.src.splitlines(keepends=True), file)  # for tracebacks
        names = dict(code.globals)
        exec(compile(code.src, file, "exec"), names)
        _FORWARDS[code.src] = names["forward"]
    return _FORWARDS[code.src]
