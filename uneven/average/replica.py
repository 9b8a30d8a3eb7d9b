"""A rank's replica as one flat buffer: its params and, where asked for, its optimizer's state.

The layout depends only on the model and the optimizer's class, so it is the same on every rank, whatever they have
trained; an optimizer that has not stepped yet has no state, and zeros stand in for it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from uneven.errors import InputError

# The state that is a running mean of gradients, and so can be averaged; step counts are not.
AVERAGED_STATE: dict[type[Optimizer], tuple[str, ...]] = {
    SGD: ("momentum_buffer",),
    Adam: ("exp_avg", "exp_avg_sq"),
    AdamW: ("exp_avg", "exp_avg_sq"),
    RMSprop: ("square_avg",),
}


class Flat:
    """Numbers side by side in one buffer, with a view per tensor."""

    def __init__(self, like: list[Tensor], dtype: torch.dtype) -> None:
        self.numbers = torch.zeros(sum(tensor.numel() for tensor in like), dtype=dtype)
        pieces = self.numbers.split([tensor.numel() for tensor in like]) if like else ()
        self.views = [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


class Replica:
    """What is averaged of a rank. `take` copies it out; `add` and `put` bring numbers of the same layout back."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, with_state: bool = False) -> None:
        self._optimizer = optimizer
        self._params = [param for param in model.parameters() if param.requires_grad]
        self._names = _state_names(optimizer) if with_state else ()
        self._like = [param.detach() for param in self._params for _ in range(1 + len(self._names))]
        dtypes = [param.dtype for param in self._params]
        self._dtype = torch.float32
        for dtype in dtypes:
            self._dtype = torch.promote_types(self._dtype, dtype)

    def flat(self) -> Flat:
        return Flat(self._like, self._dtype)

    @torch.no_grad()
    def take(self, into: Flat) -> None:
        pairs = list(zip(into.views, self._tensors(), strict=True))
        there = [(view, tensor) for view, tensor in pairs if tensor is not None]
        torch._foreach_copy_([view for view, _ in there], [tensor for _, tensor in there])
        for view, tensor in pairs:
            if tensor is None:
                view.zero_()

    def put(self, numbers: Flat) -> None:
        self._apply(torch._foreach_copy_, numbers)

    def add(self, numbers: Flat) -> None:
        self._apply(torch._foreach_add_, numbers)

    def clear_state(self) -> None:
        """What the optimizer gathered is worthless: it begins anew."""
        self._optimizer.state.clear()

    @torch.no_grad()
    def _apply(self, change: Callable[[list[Tensor], list[Tensor]], Any], numbers: Flat) -> None:
        there = [(t, view) for t, view in zip(self._tensors(), numbers.views, strict=True) if t is not None]
        change([t for t, _ in there], [view.to(t.dtype) for t, view in there])

    def _tensors(self) -> list[Tensor | None]:
        tensors: list[Tensor | None] = []
        for param in self._params:
            state = self._optimizer.state.get(param, {})
            tensors += [param.detach(), *(state.get(name) for name in self._names)]
        return tensors


def _state_names(optimizer: Optimizer) -> tuple[str, ...]:
    names = AVERAGED_STATE.get(type(optimizer))
    if names is None:
        known = ", ".join(kind.__name__ for kind in AVERAGED_STATE)
        raise InputError(
            f"optimizer_state='average' knows the state of {known}, not of {type(optimizer).__name__}; use 'keep'"
        )
    return names
