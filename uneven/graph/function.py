"""A plain function as a module, so that all parts of a graph are modules."""

import functools
import hashlib
from collections.abc import Callable
from typing import Any

from torch import nn


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
