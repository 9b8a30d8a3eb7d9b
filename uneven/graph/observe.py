"""Run a graph node by node under an observer: the profile to measure times, the dry run to check shapes.

The dry run reports a part that does not fit with its node before training starts; `FlowBuilder.build` calls it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.parameter import is_lazy

from uneven.errors import InputError
from uneven.graph.describe import short
from uneven.graph.memory import Memory
from uneven.graph.plan import ENTRY, Node, PlanModule

Compute = Callable[[], Any]
# Called with the node's path, its graph, the node, its inputs and a function that runs it; returns its value.
Observer = Callable[[str, PlanModule, Node, tuple[Any, ...], Compute], Any]


class _Observed(fx.Interpreter):
    """fx.Interpreter with every node passed to the observer."""

    def __init__(self, graph: PlanModule, path: str, observer: Observer) -> None:
        super().__init__(graph, graph=graph.fx)
        self.extra_traceback = False  # otherwise fx appends its own text to the message of an error
        self._graph = graph
        self._path = path
        self._observer = observer

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
