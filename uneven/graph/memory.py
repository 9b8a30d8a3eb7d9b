"""State across calls: the value that a tag had in the last call.

wiring.py makes a Memory for every tag that is used before it is set.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from uneven.errors import InputError


class Memory(nn.Module):
    """Returns the stored value, or stores a new one: a tensor, or a tuple, list or dict of tensors.

    It is not a buffer: it belongs to the batches of this process, so it is neither saved with the params nor averaged
    over ranks. A new value is copied into the same memory, so that a captured CUDA graph reads the last step's value.
    """

    _is_impure = (
        True  # so that torch.fx does not remove "remember" nodes as dead code: only the next call reads their value
    )

    def __init__(self, tag: str, start: Callable[[Tensor], Any] | None = None, detach: bool = True) -> None:
        super().__init__()
        self.tag = tag
        self.start = torch.zeros_like if start is None else start
        self.detach = detach
        self.value: Any = None
        self.samples = 0  # in the batch that the value belongs to

    def forward(self, stream: Tensor, new: Any = None) -> Any:
        if new is not None:
            self.samples = _samples(stream)
            self._store(new)
            return new
        if self.value is None:
            return self.start(stream)
        if self.samples != _samples(stream):
            raise InputError(
                f"state '{self.tag}' has {self.samples} samples and this batch has {_samples(stream)}: "
                "call graph.reset_state() before batches of another size"
            )
        # A copy, since the stored tensor is overwritten before backward runs.
        return (
            tree_map_only(Tensor, lambda tensor: tensor.to(stream.device).clone(), self.value)
            if self.detach
            else self.value
        )

    def _store(self, new: Any) -> None:
        if not self.detach:
            self.value = new
        elif _fits(self.value, new):
            for stored, tensor in zip(_tensors(self.value), _tensors(new), strict=True):
                stored.copy_(tensor.detach())
        else:
            self.value = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), new)

    def reset(self) -> None:
        self.value = None

    def extra_repr(self) -> str:
        start = getattr(self.start, "__qualname__", None) or type(self.start).__name__
        return f"{self.tag}, start={start}, detach={self.detach}"

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "value": None}


def _samples(stream: Any) -> int:
    return len(stream) if isinstance(stream, Tensor) and stream.dim() else 0


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _fits(old: Any, new: Any) -> bool:
    """Whether the new value can be copied into the tensors of the old one."""
    if old is None:
        return False
    kinds = [[(tensor.shape, tensor.dtype, tensor.device) for tensor in _tensors(value)] for value in (old, new)]
    # Tensors made in inference mode cannot be written outside it. torch.compile does not support the query, and does
    # not need it.
    is_read_only = not torch.compiler.is_compiling() and any(tensor.is_inference() for tensor in _tensors(old))
    return kinds[0] == kinds[1] and not is_read_only
