"""State across calls: the value that a tag had in the last call."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from uneven.errors import InputError


class Memory(nn.Module):
    """Gives the remembered value, or remembers a new one: a tensor, or tuples, lists and dicts of them.

    It is no buffer: it belongs to the batches that this process sees, so it is neither saved with the params nor
    averaged over ranks. Its address stays, so that a captured step finds what the step before left.
    """

    _is_impure = True  # for torch.fx: what is remembered is used, though no node of this call reads it

    def __init__(self, tag: str, start: Callable[[Tensor], Any] | None = None, detach: bool = True) -> None:
        super().__init__()
        self.tag = tag
        self.start = torch.zeros_like if start is None else start
        self.detach = detach
        self.value: Any = None
        self.samples = 0  # of the batch that the value belongs to

    def forward(self, stream: Tensor, new: Any = None) -> Any:
        if new is not None:
            self.samples = _samples(stream)
            self._remember(new)
            return new
        if self.value is None:
            return self.start(stream)
        if self.samples != _samples(stream):
            raise InputError(
                f"state '{self.tag}' is of {self.samples} samples and this batch has {_samples(stream)}: "
                "call graph.reset_state() before batches of another size"
            )
        # A copy, since the kept tensor is overwritten before backward has run.
        return (
            tree_map_only(Tensor, lambda tensor: tensor.to(stream.device).clone(), self.value)
            if self.detach
            else self.value
        )

    def _remember(self, new: Any) -> None:
        if not self.detach:
            self.value = new
        elif _fits(self.value, new):
            for kept, tensor in zip(_tensors(self.value), _tensors(new), strict=True):
                kept.copy_(tensor.detach())
        else:
            self.value = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), new)

    def reset(self) -> None:
        self.value = None

    def extra_repr(self) -> str:
        begins = getattr(self.start, "__qualname__", None) or type(self.start).__name__
        return f"{self.tag}, start={begins}, detach={self.detach}"

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "value": None}


def _samples(stream: Any) -> int:
    return len(stream) if isinstance(stream, Tensor) and stream.dim() else 0


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _fits(old: Any, new: Any) -> bool:
    """Whether the new value can be written where the old one is."""
    if old is None:
        return False
    kinds = [[(tensor.shape, tensor.dtype, tensor.device) for tensor in _tensors(value)] for value in (old, new)]
    # What was made in inference mode cannot be written outside it; torch.compile cannot ask, and does not need to.
    is_fixed = not torch.compiler.is_compiling() and any(tensor.is_inference() for tensor in _tensors(old))
    return kinds[0] == kinds[1] and not is_fixed
