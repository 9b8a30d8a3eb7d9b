"""A plain function as a module, so that a graph has one kind of part."""

import functools
import hashlib
from collections.abc import Callable
from typing import Any

from torch import nn


class Function(nn.Module):
    """Calls a function. It pickles if the function does: a lambda does not, but for cloudpickle."""

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
    """A text that identifies a function: its module and name; for a lambda a hash of its code, else its repr."""
    if isinstance(function, functools.partial):
        given = [*map(repr, function.args), *(f"{name}={value!r}" for name, value in function.keywords.items())]
        return f"{identity(function.func)}({', '.join(given)})"
    name = getattr(function, "__qualname__", None)
    if name is None:
        return repr(function)
    code = getattr(function, "__code__", None)
    if "<" in name and code is not None:
        # Lambdas share one name. Their code, unlike a name, differs between versions of Python.
        digest = hashlib.sha256(repr((code.co_code, code.co_names, _constants(code.co_consts))).encode()).hexdigest()[
            :8
        ]
        return f"{function.__module__}.{name} {digest}"
    return f"{getattr(function, '__module__', '')}.{name}".lstrip(".")


def _constants(constants: tuple[Any, ...]) -> list[Any]:
    """Constants without memory addresses: an inner function counts by its own constants."""
    return [_constants(value.co_consts) if hasattr(value, "co_consts") else repr(value) for value in constants]
