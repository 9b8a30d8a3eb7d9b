"""PlanModule: an nn.Module that runs a plan, as fx.GraphModule runs an fx graph.

Everything that reads a graph (describe, structure, observe, profile, drawing) works on PlanModule; the class that users
see, Graph, stands on top of them and offers them as methods.
"""

import hashlib
import linecache
import operator
from collections.abc import Mapping
from functools import reduce
from types import MethodType
from typing import Any

import torch
from torch import fx, nn

from uneven.graph.memory import Memory
from uneven.graph.plan import Node, Plan


class PlanModule(nn.Module):
    """A plan and the modules that it calls, which are ordinary children under readable names.

    Invariant: the plan and the children define the module; the fx graph and the forward are derived from them, and are
    made anew in every copy.
    """

    def __init__(self, plan: Plan, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.plan = plan
        self.shapes: dict[str, tuple[int, ...]] = {}  # of the nodes' values, once an example ran
        for name, module in modules.items():
            self.add_module(name, module)
        self._compile_plan()

    @property
    def fx(self) -> fx.Graph:
        """The computation as torch.fx sees it; `fx.GraphModule(graph, graph.fx)` is for its tools."""
        return self._fx

    @property
    def code(self) -> str:
        """The forward that runs, as Python."""
        return self._fx.python_code("self").src

    def reset_state(self) -> None:
        """Forget the state kept across calls, here and in sub-graphs."""
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
        """Make the fx graph of the plan, and its code this module's forward."""
        self._fx = to_fx(self.plan)
        # In the instance, so that its signature is visible and torch.compile distinguishes graphs by their code.
        self.__dict__["forward"] = MethodType(_forward_of(self._fx, self.plan.label), self)


def to_fx(plan: Plan) -> fx.Graph:
    """One or a few fx nodes per node of the plan, whose name is in their `meta["node"]`."""
    graph = fx.Graph()
    values: dict[str, fx.Node] = {}
    for node in plan.nodes:
        values[node.name] = _append(graph, node, [values[source] for source in node.sources])
        for made in reversed(graph.nodes):
            if "node" in made.meta:
                break
            made.meta["node"] = node.name
    ends = tuple(values[name] for name in plan.outputs)
    graph.output(ends if len(ends) > 1 else ends[0])
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


_FORWARDS: dict[str, Any] = {}  # by source


def _forward_of(graph: fx.Graph, label: str) -> Any:
    """The forward of an fx graph. Graphs with the same code share it, as objects of one class share their methods."""
    code = graph.python_code("self")
    if code.src not in _FORWARDS:
        file = f"<graph {label or 'without label'} {hashlib.sha256(code.src.encode()).hexdigest()[:8]}>"
        linecache.cache[file] = (len(code.src), None, code.src.splitlines(keepends=True), file)  # for tracebacks
        names = dict(code.globals)
        exec(compile(code.src, file, "exec"), names)
        _FORWARDS[code.src] = names["forward"]
    return _FORWARDS[code.src]
