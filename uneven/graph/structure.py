"""What makes a graph the same graph: its nodes, modules and sources, without the values of params."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from torch import nn

from uneven.graph.plan import Plan

if TYPE_CHECKING:
    from uneven.graph.graph import Graph


def structure_of(graph: "Graph", indent: str = "") -> Iterator[str]:
    """Lines such that two graphs compute the same function of their params if they have the same lines.

    Custom modules count by type, `extra_repr` and shapes of params: two that differ in nothing of this look alike.
    """
    for node in graph.plan.nodes:
        yield f"{indent}{node.name} = {_kind(graph, node.target, node.kind)}({', '.join(node.sources)})" + (
            f" along {node.dim}" if node.kind == "cat" else ""
        )
        if node.kind == "call":
            yield from _inside(graph.get_submodule(node.target), indent + "  ")
    yield f"{indent}-> {', '.join(graph.plan.outputs)}"


def _kind(graph: "Graph", target: str, kind: str) -> str:
    if kind != "call":
        return f"{kind} {target}".strip()
    module = graph.get_submodule(target)
    return f"{target}: {type(module).__name__}[{module.extra_repr()}]"


def _inside(module: nn.Module, indent: str) -> Iterator[str]:
    if isinstance(getattr(module, "plan", None), Plan):
        yield from structure_of(cast("Graph", module), indent)
        return
    for name, param in module.named_parameters(recurse=False):
        yield f"{indent}{name} {tuple(param.shape)}"
    for name, child in module.named_children():
        yield f"{indent}{name}: {type(child).__name__}[{child.extra_repr()}]"
        yield from _inside(child, indent + "  ")
