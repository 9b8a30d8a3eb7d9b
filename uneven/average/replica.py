"""A rank's replica as one flat buffer: its params and, with optimizer_state='average', its optimizer state.

Invariant: the layout depends only on the model and the optimizer's class, so it is the same on every rank; state that
does not exist yet, before the first step, is zeros in the buffer. The buffer is real: a complex tensor is two numbers.
"""

from collections.abc import Callable, Sequence

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
    """One flat buffer with a view per tensor."""

    def __init__(self, like: list[Tensor], dtype: torch.dtype, device: torch.device, *, pinned: bool = False) -> None:
        count = sum(tensor.numel() for tensor in like)
        self.buffer = torch.zeros(count, dtype=dtype, device=device, pin_memory=pinned)
        ranges = self.buffer.split([tensor.numel() for tensor in like]) if like else ()
        self.views = [part.view(tensor.shape) for part, tensor in zip(ranges, like, strict=True)]


class Replica:
    """What is averaged of a rank: `copy_to` copies it into a Flat, `load` and `merge` write a Flat back."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, with_state: bool = False) -> None:
        self._optimizer = optimizer
        self._params = [param for param in model.parameters() if param.requires_grad]
        self._names = _state_names(optimizer) if with_state else ()
        self._dtype = torch.float32
        for param in self._params:
            self._dtype = torch.promote_types(self._dtype, _as_real(param.detach()).dtype)

    @property
    def device(self) -> torch.device:
        return self._params[0].device if self._params else torch.device("cpu")

    def new_flat(self) -> Flat:
        """A buffer for all params, then for their state, name by name, on the params' device."""
        return Flat(self._layout, self._dtype, self.device)

    def new_pinned_flat(self) -> Flat:
        """The same in pinned host memory."""
        return Flat(self._layout, self._dtype, torch.device("cpu"), pinned=True)

    @torch.no_grad()
    def copy_to(self, into: Flat) -> None:
        pairs = list(zip(into.views, self._tensors(), strict=True))
        _apply_to_pairs(torch._foreach_copy_, [view for view, _ in pairs], [tensor for _, tensor in pairs])
        for view, tensor in pairs:
            if tensor is None:
                view.zero_()

    def load(self, flat: Flat) -> None:
        """Overwrite params and state."""
        _apply_to_pairs(torch._foreach_copy_, self._tensors(), flat.views)

    def merge(self, average: Flat, delta: Flat) -> None:
        """Add average - snapshot to the params, so that what was trained since the snapshot is kept.

        State is overwritten by the average: it has decayed since the snapshot, and adding a negative delta to a mean of
        squares could make it negative.
        """
        tensors, count = self._tensors(), len(self._params)
        _apply_to_pairs(torch._foreach_add_, tensors[:count], delta.views[:count])
        _apply_to_pairs(torch._foreach_copy_, tensors[count:], average.views[count:])

    @property
    def _layout(self) -> list[Tensor]:
        return [_as_real(param.detach()) for _ in range(1 + len(self._names)) for param in self._params]

    def _tensors(self) -> list[Tensor | None]:
        states = [self._optimizer.state.get(param, {}) for param in self._params]
        found = [*(p.detach() for p in self._params), *(state.get(name) for name in self._names for state in states)]
        return [None if tensor is None else _as_real(tensor) for tensor in found]


def _as_real(tensor: Tensor) -> Tensor:
    """A view of its values as real numbers: those of other params in the same buffer cannot take complex ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def is_finite(values: Tensor) -> bool:
    """Whether all of them are; a finite sum has finite terms and costs a fraction of a check of each."""
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())  # a finite sum may overflow


@torch.no_grad()
def _apply_to_pairs(
    foreach: Callable[[list[Tensor], list[Tensor]], object],
    targets: Sequence[Tensor | None],
    sources: Sequence[Tensor | None],
) -> None:
    """Skips missing state: an optimizer that has not stepped yet makes its own."""
    pairs = [(t, s) for t, s in zip(targets, sources, strict=True) if t is not None and s is not None]
    if pairs:
        foreach([target for target, _ in pairs], [source for _, source in pairs])


def _state_names(optimizer: Optimizer) -> tuple[str, ...]:
    names = AVERAGED_STATE.get(type(optimizer))
    if names is None:
        known = ", ".join(kind.__name__ for kind in AVERAGED_STATE)
        raise InputError(
            f"optimizer_state='average' knows the state of {known}, not of {type(optimizer).__name__}; use 'keep'"
        )
    return names
