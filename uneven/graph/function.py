"""A plain function as a module, so that a graph has one kind of part."""

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
        return self.name
