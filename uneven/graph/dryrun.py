"""One run of a new graph on an example, so that what does not fit is told with its node."""

from typing import Any

import torch
from torch import Tensor

from uneven.errors import InputError
from uneven.graph.describe import short
from uneven.graph.graph import Graph
from uneven.graph.observe import Compute, observed
from uneven.graph.plan import ENTRY, Node


def dry_run(graph: Graph, example: tuple[Any, ...]) -> None:
    """InputError where a node cannot take what it gets; otherwise notes the shapes of all values.

    Nothing else is left behind: modules are in eval mode meanwhile, the random state and the memories are put back.
    """
    if len(example) != len(graph.plan.inputs):
        raise InputError(
            f"the example has {len(example)} inputs, the graph {len(graph.plan.inputs)}: {', '.join(graph.plan.inputs)}"
        )
    modes = [(module, module.training) for module in graph.modules()]
    graph.eval()
    try:
        with torch.random.fork_rng(), torch.no_grad(), observed(graph, _watch):
            graph(*example)
            graph(*example)  # state across calls must fit, too
    finally:
        graph.reset_state()
        for module, mode in modes:
            module.training = mode


def _watch(path: str, graph: Graph, node: Node, inputs: tuple[Any, ...], compute: Compute) -> Any:
    try:
        if node.kind in ("add", "mean"):
            _refuse_broadcast(inputs)
        value = compute()
    except InputError as error:
        raise error if str(error).startswith("node ") else _told(path, graph, node, error) from error
    except Exception as error:
        raise _told(path, graph, node, error) from error
    graph.shapes.pop(node.name, None)
    if isinstance(value, Tensor):
        graph.shapes[node.name] = tuple(value.shape)
    return value


def _refuse_broadcast(inputs: tuple[Any, ...]) -> None:
    """A sum of (8, 1) and (8, 2) computes something, and hardly ever what was meant."""
    if len({tuple(value.shape) for value in inputs if isinstance(value, Tensor)}) > 1:
        raise InputError("their shapes differ")


def _told(path: str, graph: Graph, node: Node, error: Exception) -> InputError:
    what = node.kind if not node.target else short(graph.get_submodule(node.target))
    given = ", ".join(
        f"{'the input' if source == ENTRY else repr(source)} {graph.shapes.get(source, '')}".rstrip()
        for source in node.sources
    )
    reason = str(error).rstrip(".")
    return InputError(f"node {path!r} ({what}) cannot take {given}: {reason}. {_fix(node, graph)}")


def _fix(node: Node, graph: Graph) -> str:
    if node.verb == "also":
        return "Give the skip a part of its own, so that both have one shape: .also_with(skip, part)"
    if node.verb == "merge":
        return "Branches that merge need one shape ('cat': but for its dimension): change them, or merge by a function"
    recalled = [source for source in node.sources if graph.plan.node(source).kind == "recall"]
    if recalled:
        tag = recalled[0].removeprefix("recall_")
        return f"If the state {tag!r} starts with another shape than the stream, say how: .using({tag!r}, start=...)"
    return "Change this part, or the one before it, so that they fit"
