"""The structure of a graph as text: its nodes, modules and sources, without the values of params.

`Graph.save` stores it and `Graph.load` compares it.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from uneven.graph.function import Function, identity
from uneven.graph.memory import Memory
from uneven.graph.plan import PlanModule

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
