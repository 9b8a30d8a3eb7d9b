"""Run a graph node by node under an observer. The dry run uses it to check shapes, the profile to measure times."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx

from uneven.errors import InputError
from uneven.graph.plan import Node, PlanModule

Compute = Callable[[], Any]
# Called with the node's path, its graph, the node, its inputs and a function that runs it; returns its value.
Observer = Callable[[str, PlanModule, Node, tuple[Any, ...], Compute], Any]


class _Observed(fx.Interpreter):
    """fx.Interpreter with every node passed to the observer."""

    def __init__(self, graph: PlanModule, path: str, observer: Observer) -> None:
        super().__init__(graph, graph=graph.fx)
        self.extra_traceback = False  # otherwise fx appends its own text to the message of an error
        self._graph, self._path, self._observer = graph, path, observer

    def run_node(self, n: fx.Node) -> Any:
        def compute() -> Any:
            return super(_Observed, self).run_node(n)

        if "node" not in n.meta:
            return compute()
        node = self._graph.plan.node(n.meta["node"])
        inputs = tuple(self.env[source] for source in n.all_input_nodes)
        return self._observer(f"{self._path}{node.name}", self._graph, node, inputs, compute)


@contextmanager
def observed(graph: PlanModule, observer: Observer) -> Iterator[None]:
    """Within this context, every node of the graph and of the graphs inside it runs through the observer."""
    graphs = [(path, module) for path, module in graph.named_modules() if isinstance(module, PlanModule)]
    saved = [inner.__dict__["forward"] for _, inner in graphs]
    for path, inner in graphs:
        inner.__dict__["forward"] = _observed_forward(inner, f"{path}." if path else "", observer)
    try:
        yield
    finally:
        for (_, inner), forward in zip(graphs, saved, strict=True):
            inner.__dict__["forward"] = forward


def _observed_forward(graph: PlanModule, path: str, observer: Observer) -> Callable[..., Any]:
    def forward(*inputs: Any, **named: Any) -> Any:
        missing = [name for name in graph.plan.inputs[len(inputs) :] if name not in named]
        if missing:
            raise InputError(f"the graph takes {', '.join(graph.plan.inputs)}, and {missing[0]!r} is missing")
        arguments = [*inputs, *(named[name] for name in graph.plan.inputs[len(inputs) :])]
        return _Observed(graph, path, observer).run(*arguments)

    return forward
