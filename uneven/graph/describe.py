"""Graphs and their modules as text: the summary table, the structure, short descriptions, sizes, plain text tables."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from uneven.format import align_columns
from uneven.graph.function import Function, identity
from uneven.graph.memory import Memory
from uneven.graph.plan import PlanModule


def summary(graph: PlanModule) -> str:
    """A table of the nodes. Shapes are those of the example passed to `build`; without one they are left out."""
    params = count(graph)
    trained = count(graph, only_trained=True)
    total = f"{params:,} params" + (f", {trained:,} of them trained" if trained != params else "")
    name = graph.plan.label or "graph"
    return table(("node", "module", "from", "value", "params"), list(_summary_rows(graph, ""))) + (
        f"\n{name}: {total}, structure {structural_hash(graph)}"
    )


def _summary_rows(graph: PlanModule, path: str) -> Iterator[tuple[str, ...]]:
    for node in graph.plan.nodes:
        shape = str(graph.shapes[node.name]) if node.name in graph.shapes else ""
        if not node.target:
            yield (path + node.name, node.kind, ", ".join(node.sources), shape, "")
            continue
        module = graph.get_submodule(node.target)
        num_params = count(module)
        params = f"{num_params:,}" if num_params and not is_inner(module) else ""
        yield (path + node.name, short(module), ", ".join(node.sources), shape, params)
        for inner, child in inner_graphs(module):
            yield from _summary_rows(child, f"{path}{node.name}.{inner}." if inner else f"{path}{node.name}.")


def short(module: nn.Module) -> str:
    """A short description of a module, such as `Conv2d 3x3, 16 to 32, stride 2`."""
    if isinstance(module, Function):
        return module.name.strip("_")
    kind = type(module).__name__
    if isinstance(module, PlanModule):
        return module.plan.label or "flow"
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        size, stride = "x".join(map(str, module.kernel_size)), max(module.stride)
        return f"{kind} {size}, {module.in_channels} to {module.out_channels}" + (
            f", stride {stride}" if stride > 1 else ""
        )
    if isinstance(module, nn.Linear):
        return f"{kind} {module.in_features} to {module.out_features}"
    if isinstance(module, _BatchNorm):
        return f"{kind} {module.num_features}"
    if any(True for _ in module.children()):
        return kind
    inner = module.extra_repr()
    return f"{kind} {inner}" if inner and len(inner) <= 24 else kind


def inner_graphs(module: nn.Module) -> Iterator[tuple[str, PlanModule]]:
    """The outermost graphs inside a module, with their paths in it ("" if the module is a graph itself)."""
    if isinstance(module, PlanModule):
        yield "", module
        return
    for name, child in module.named_children():
        for path, graph in inner_graphs(child):
            yield f"{name}.{path}".rstrip("."), graph


def is_inner(module: nn.Module) -> bool:
    """Whether a module contains a graph, whose nodes are listed themselves."""
    return next(inner_graphs(module), None) is not None


def count(module: nn.Module, only_trained: bool = False) -> int:
    """The number of params; lazy params without a shape count as 0."""
    params = [param for param in module.parameters() if param.requires_grad or not only_trained]
    return sum(param.numel() for param in params if not is_lazy(param))


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A plain text table with columns as wide as their widest entry; numbers are aligned right."""
    columns = list(zip(head, *lines, strict=True))
    is_number = [all(not entry or entry[0].isdigit() or entry[0] == "(" for entry in column[1:]) for column in columns]
    right = [place for place, is_right in enumerate(is_number) if is_right]
    return "\n".join(align_columns([head, *lines], right))


_PLAIN = (bool, int, float, str, tuple, type(None))


def structure_of(graph: PlanModule) -> str:
    """Text that is equal for two graphs only if they compute the same function of the same params.

    A module is represented by its type, its attributes that are plain values or functions, and the shapes of its params
    and buffers. State that it keeps elsewhere (in other objects, in closures) is not seen. Shared params are marked.
    """
    return "\n".join(_lines(graph, "", {}))


def structural_hash(graph: PlanModule) -> str:
    return hashlib.sha256(structure_of(graph).encode()).hexdigest()[:16]


def _lines(graph: PlanModule, indent: str, known: dict[int, str], path: str = "") -> Iterator[str]:
    for node in graph.plan.nodes:
        along = f" along {node.dim}" if node.kind == "cat" else ""
        if node.kind == "call":
            module = graph.get_submodule(node.target)
            yield f"{indent}{node.name} = {node.target}: {_kind(module)}({', '.join(node.sources)})"
            yield from _lines_of_module(module, indent + "  ", known, f"{path}{node.target}.")
        else:
            memory = f" {_kind(graph.get_submodule(node.target))}" if node.kind == "recall" else ""
            yield f"{indent}{node.name} = {node.kind}{memory}({', '.join(node.sources)}){along}"
    yield f"{indent}-> {', '.join(graph.plan.outputs)}"


def _lines_of_module(module: nn.Module, indent: str, known: dict[int, str], path: str) -> Iterator[str]:
    if isinstance(module, PlanModule):
        yield from _lines(module, indent, known, path)
        return
    for name, param in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        shape = "not known yet" if is_lazy(param) else str(tuple(param.shape))
        first = known.setdefault(id(param), f"{path}{name}")
        yield f"{indent}{name} {shape}" + ("" if first == f"{path}{name}" else f", the same as {first}")
    for name, child in module.named_children():
        yield f"{indent}{name}: {_kind(child)}"
        yield from _lines_of_module(child, indent + "  ", known, f"{path}{name}.")


def _kind(module: nn.Module) -> str:
    """A module's type and plain attributes. SyncBatchNorm counts as BatchNorm: it computes the same function."""
    name = "BatchNorm" if isinstance(module, _BatchNorm) else type(module).__name__
    if isinstance(module, Function | Memory | _BatchNorm):
        return f"{name}[{module.extra_repr()}]"
    attributes = {key: value for key, value in vars(module).items() if key[0] != "_" and key != "training"}
    facts = [f"{key}={value!r}" for key, value in sorted(attributes.items()) if _is_plain(value)]
    facts += [f"{key}={identity(value)}" for key, value in sorted(attributes.items()) if _is_function(value)]
    return f"{name}[{', '.join(facts)}]"


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, nn.Module | type)
