"""A graph as a table: its nodes with modules, shapes and numbers of params."""

from collections.abc import Iterator

from uneven.graph.describe import count, inner_graphs, is_inner, short, table
from uneven.graph.graph import Graph


def summary(graph: Graph) -> str:
    """Shapes are those of the example that `build` was given; without one they are left out."""
    params = count(graph)
    trained = count(graph, only_trained=True)
    total = f"{params:,} params" + (f", {trained:,} of them trained" if trained != params else "")
    name = graph.plan.label or "graph"
    return table(("node", "module", "from", "value", "params"), list(_rows(graph, ""))) + (
        f"\n{name}: {total}, structure {graph.structural_hash}"
    )


def _rows(graph: Graph, path: str) -> Iterator[tuple[str, ...]]:
    for node in graph.plan.nodes:
        shape = str(graph.shapes[node.name]) if node.name in graph.shapes else ""
        if not node.target:
            yield (path + node.name, node.kind, ", ".join(node.sources), shape, "")
            continue
        module = graph.get_submodule(node.target)
        many = count(module)
        own = f"{many:,}" if many and not is_inner(module) else ""
        yield (path + node.name, short(module), ", ".join(node.sources), shape, own)
        for inner, child in inner_graphs(module):
            yield from _rows(child, f"{path}{node.name}.{inner}." if inner else f"{path}{node.name}.")
