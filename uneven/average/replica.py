"""A rank's replica as one flat buffer: its params and, where asked for, its optimizer's state.

The layout depends only on the model and the optimizer's class, so it is the same on every rank, whatever they have
trained; an optimizer that has not stepped yet has no state, and zeros stand in for it.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
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

    def __init__(self, like: list[Tensor], dtype: torch.dtype, device: torch.device, *, pinned: bool = False) -> None:
        count = sum(tensor.numel() for tensor in like)
        self.numbers = torch.zeros(count, dtype=dtype, device=device, pin_memory=pinned)
        pieces = self.numbers.split([tensor.numel() for tensor in like]) if like else ()
        self.views = [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


class Replica:
    """What is averaged of a rank. `take` copies it out; `put` and `merge` bring numbers of the same layout back."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, with_state: bool = False) -> None:
        self._optimizer = optimizer
        self._params = [param for param in model.parameters() if param.requires_grad]
        self._names = _state_names(optimizer) if with_state else ()
        self._dtype = torch.float32
        for param in self._params:
            self._dtype = torch.promote_types(self._dtype, param.dtype)
        self._fresh = _copied(optimizer.state)

    @property
    def device(self) -> torch.device:
        return self._params[0].device if self._params else torch.device("cpu")

    def flat(self) -> Flat:
        """Room for all params, then for their state, name by name, beside the params."""
        return Flat(self._layout, self._dtype, self.device)

    def host_flat(self) -> Flat:
        """The same in host memory that a CUDA device reads and writes by itself."""
        return Flat(self._layout, self._dtype, torch.device("cpu"), pinned=True)

    @torch.no_grad()
    def take(self, into: Flat) -> None:
        pairs = list(zip(into.views, self._tensors(), strict=True))
        _change(torch._foreach_copy_, [view for view, _ in pairs], [tensor for _, tensor in pairs])
        for view, tensor in pairs:
            if tensor is None:
                view.zero_()

    def put(self, numbers: Flat) -> None:
        _change(torch._foreach_copy_, self._tensors(), numbers.views)

    def merge(self, average: Flat, change: Flat) -> None:
        """Params keep what they learned since the snapshot: they are changed by what the average changes in it.

        State is overwritten, as running statistics are: it has decayed since, and a mean of squares that a change is
        taken from may end below 0.
        """
        tensors, count = self._tensors(), len(self._params)
        _change(torch._foreach_add_, tensors[:count], change.views[:count])
        _change(torch._foreach_copy_, tensors[count:], average.views[count:])

    def clear_state(self) -> None:
        """What the optimizer gathered is worthless: it begins anew, as it was when the replica was made.

        A tensor that was there then keeps its place: a captured step has its address.
        """
        now = self._optimizer.state
        restored = _copied(self._fresh)
        for param, values in restored.items():
            for name, value in values.items():
                there = now.get(param, {}).get(name)
                if isinstance(value, Tensor) and isinstance(there, Tensor):
                    values[name] = there.copy_(value)
        now.clear()
        now.update(restored)

    @property
    def _layout(self) -> list[Tensor]:
        return [param.detach() for _ in range(1 + len(self._names)) for param in self._params]

    def _tensors(self) -> list[Tensor | None]:
        states = [self._optimizer.state.get(param, {}) for param in self._params]
        return [*(p.detach() for p in self._params), *(state.get(name) for name in self._names for state in states)]


@torch.no_grad()
def _change(
    change: Callable[[list[Tensor], list[Tensor]], object],
    tensors: Sequence[Tensor | None],
    by: Sequence[Tensor | None],
) -> None:
    """Pairs with a gap are left alone: an optimizer that has not stepped yet begins by itself."""
    pairs = [(to, one) for to, one in zip(tensors, by, strict=True) if to is not None and one is not None]
    if pairs:
        change([to for to, _ in pairs], [one for _, one in pairs])


def _copied(state: Mapping[Tensor, Any]) -> dict[Tensor, Any]:
    return {param: copy.deepcopy(values) for param, values in state.items()}


def _state_names(optimizer: Optimizer) -> tuple[str, ...]:
    names = AVERAGED_STATE.get(type(optimizer))
    if names is None:
        known = ", ".join(kind.__name__ for kind in AVERAGED_STATE)
        raise InputError(
            f"optimizer_state='average' knows the state of {known}, not of {type(optimizer).__name__}; use 'keep'"
        )
    return names
