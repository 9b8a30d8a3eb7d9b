"""Run a new graph once on an example: a part that does not fit is reported with its node before training starts.

`FlowBuilder.build` calls it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from uneven.errors import InputError
from uneven.graph.describe import short
from uneven.graph.memory import Memory
from uneven.graph.observe import Compute, observed
from uneven.graph.plan import ENTRY, Node, PlanModule


def dry_run(graph: PlanModule, example: tuple[Any, ...]) -> None:
    """Run the graph and record the shapes of all values; InputError if a node cannot take its inputs.

    Params, buffers, memories, modes, random states and the example are unchanged afterwards. Hooks are called. Of a
    switch only the branches that the example selects are checked.
    """
    if len(example) != len(graph.plan.inputs):
        names = ", ".join(graph.plan.inputs)
        raise InputError(f"the example has {len(example)} inputs, the graph {len(graph.plan.inputs)}: {names}")
    modes = [(module, module.training) for module in graph.modules()]
    memories = [(module, module.value, module.samples) for module in graph.modules() if isinstance(module, Memory)]
    buffers = [(buffer, buffer.clone()) for buffer in graph.buffers() if not is_lazy(buffer)]
    graph.eval()
    graph.reset_state()
    try:
        with torch.random.fork_rng(_cuda_devices(graph, example)), torch.no_grad(), observed(graph, _check_node):
            # The second run checks the state across calls, which the first run stored.
            for _ in range(2 if memories else 1):
                graph(*(value.clone() if isinstance(value, Tensor) else value for value in example))
    finally:
        for memory, value, samples in memories:
            memory.value, memory.samples = value, samples
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, saved in buffers:
                buffer.copy_(saved)


def _cuda_devices(graph: PlanModule, example: tuple[Any, ...]) -> list[int]:
    """The devices whose random state the run can change. Saving all of them would initialise every GPU."""
    tensors = [*graph.parameters(), *graph.buffers(), *(value for value in example if isinstance(value, Tensor))]
    return sorted({tensor.device.index or 0 for tensor in tensors if tensor.device.type == "cuda"})


def _check_node(path: str, graph: PlanModule, node: Node, inputs: tuple[Any, ...], compute: Compute) -> Any:
    before = [value._version for value in inputs if isinstance(value, Tensor)]
    try:
        if node.kind in ("add", "mean"):
            _refuse_broadcast(inputs)
        value = compute()
        if [value._version for value in inputs if isinstance(value, Tensor)] != before:
            _refuse_in_place(graph, node)
    except RecursionError:
        raise
    except InputError as error:
        raise error if str(error).startswith("node ") else _fault(path, graph, node, error) from error
    except Exception as error:
        raise _fault(path, graph, node, error) from error
    graph.shapes.pop(node.name, None)
    if isinstance(value, Tensor):
        graph.shapes[node.name] = tuple(value.shape)
    return value


def _refuse_in_place(graph: PlanModule, node: Node) -> None:
    """InputError if a part changes in place a value that another node or the caller reads."""
    plan = graph.plan
    for source in node.sources:
        users = [other.name for other in plan.nodes if source in other.sources and other.name != node.name]
        is_input = plan.node(source).kind == "input"
        if users or is_input or source in plan.outputs:
            reader = users[0] if users else "the caller"
            raise InputError(f"it changes {source!r} in place, which {reader!r} also reads: use inplace=False")


def _refuse_broadcast(inputs: tuple[Any, ...]) -> None:
    """InputError for a sum such as (8, 1) + (8, 2): it would broadcast, which is hardly ever intended."""
    if len({tuple(value.shape) for value in inputs if isinstance(value, Tensor)}) > 1:
        raise InputError("their shapes differ")


def _fault(path: str, graph: PlanModule, node: Node, error: Exception) -> InputError:
    what = node.kind if not node.target else short(graph.get_submodule(node.target))
    sources = ", ".join(
        f"{'the input' if source == ENTRY else repr(source)} {graph.shapes.get(source, '')}".rstrip()
        for source in node.sources
    )
    reason = str(error).rstrip(".")
    return InputError(f"node {path!r} ({what}) cannot take {sources}: {reason}. {_fix(node, graph)}")


def _fix(node: Node, graph: PlanModule) -> str:
    if node.verb == "also":
        return (
            "Give the skip a part of its own, so that both have one shape: .also_with(skip, part); a sum that is meant "
            "to broadcast is .split([a, b]).merge(torch.add)"
        )
    if node.verb == "merge":
        return "Branches to merge need one shape (for 'cat' except along its dim): change them, or merge by a function"
    recalled = [source for source in node.sources if graph.plan.node(source).kind == "recall"]
    if recalled:
        tag = recalled[0].removeprefix("recall_")
        return f"If the state {tag!r} starts with another shape than the stream: .using({tag!r}, start=...)"
    if any(source not in graph.shapes for source in node.sources):
        return "If the part before it returns a tuple, select one element: .through(operator.itemgetter(0))"
    return "Change this part, or the one before it, so that they fit"
