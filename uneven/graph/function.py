"""A plain function as a module, so that all parts of a graph are modules."""

import dis
import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from torch import nn

from uneven.errors import InputError


class Function(nn.Module):
    """Calls a function. It can be pickled if the function can; lambdas need cloudpickle."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", None) or type(self.function).__name__

    def extra_repr(self) -> str:
        return identity(self.function)


def identity(function: Any) -> str:
    """A text that identifies a function: module and name, with a hash of the code for a lambda; otherwise its repr."""
    if isinstance(function, functools.partial):
        arguments = [*map(repr, function.args), *(f"{name}={value!r}" for name, value in function.keywords.items())]
        return f"{identity(function.func)}({', '.join(arguments)})"
    name = getattr(function, "__qualname__", None)
    if name is None:
        return repr(function)
    code = getattr(function, "__code__", None)
    if "<" in name and code is not None:
        # All lambdas have the same name. The hash of their code differs between versions of Python.
        digest = hashlib.sha256(repr((code.co_code, code.co_names, _constants(code.co_consts))).encode()).hexdigest()[
            :8
        ]
        return f"{function.__module__}.{name} {digest}"
    return f"{getattr(function, '__module__', '')}.{name}".lstrip(".")


def _constants(constants: tuple[Any, ...]) -> list[Any]:
    """Constants without memory addresses: an inner function is represented by its own constants."""
    return [_constants(value.co_consts) if hasattr(value, "co_consts") else repr(value) for value in constants]


def refuse_hidden_params(graph: nn.Module) -> None:
    """InputError for a function that uses a module of its own: its params would be neither trained nor saved.

    A graph has the params of the modules that are its parts; those that a lambda or a partial brings along are not
    among them. One that uses a part of the graph, as for tied weights, is taken, and so are params that are frozen.
    """
    own = {id(param) for param in graph.parameters()}
    for part in graph.modules():
        for how, module in _modules_of(part.function) if isinstance(part, Function) else ():
            if any(param.requires_grad and id(param) not in own for param in module.parameters()):
                raise InputError(
                    f"the part {part.name!r} holds {how} ({type(module).__name__}), whose params would not be trained: "
                    "pass the module itself as a part, and what is done with its result as the next one"
                )


def _modules_of(function: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a function reads from around it, or that a partial was given, each with its name there."""
    values: dict[str, Any] = {}
    if isinstance(function, functools.partial):
        yield from _modules_of(function.func)
        values = {
            "its function": function.func,
            **{f"argument {i + 1}": value for i, value in enumerate(function.args)},
        }
        values |= {f"{name}=": value for name, value in function.keywords.items()}
    elif inspect.ismethod(function):
        values = {"its owner": function.__self__}
    elif inspect.isfunction(function):
        # Not inspect.getclosurevars: it takes the attribute in `x.norm()` for a global of that name.
        read = {step.argval for step in dis.get_instructions(function) if step.opname == "LOAD_GLOBAL"}
        values = {name: function.__globals__.get(name) for name in read}
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # a name that is not bound yet
                values[name] = cell.cell_contents
    yield from ((repr(name), value) for name, value in values.items() if isinstance(value, nn.Module))
