"""A plan as a torch.fx graph: what fx can inspect, transform and write as Python code."""

import operator
from functools import reduce

import torch
from torch import fx

from uneven.graph.plan import Node, Plan


def to_fx(plan: Plan) -> fx.Graph:
    """One or a few fx nodes per node of the plan, whose name is in their `meta["node"]`."""
    graph = fx.Graph()
    values: dict[str, fx.Node] = {}
    for node in plan.nodes:
        values[node.name] = _lay(graph, node, [values[source] for source in node.sources])
        for laid in reversed(graph.nodes):
            if "node" in laid.meta:
                break
            laid.meta["node"] = node.name
    ends = tuple(values[name] for name in plan.outputs)
    graph.output(ends if len(ends) > 1 else ends[0])
    return graph


def _lay(graph: fx.Graph, node: Node, sources: list[fx.Node]) -> fx.Node:
    if node.kind == "input":
        return graph.placeholder(node.name)
    if node.kind in ("call", "recall", "remember"):
        return graph.call_module(node.target, tuple(sources))
    if node.kind == "cat":
        return graph.call_function(torch.cat, (sources, node.dim))
    total = reduce(lambda one, other: graph.call_function(operator.add, (one, other)), sources)
    if node.kind == "add":
        return total
    assert node.kind == "mean", node.kind
    return graph.call_function(operator.truediv, (total, len(sources)))
