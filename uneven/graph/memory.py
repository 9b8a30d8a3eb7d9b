"""State across calls: what a tag's value was in the last call."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from uneven.errors import InputError


class Memory(nn.Module):
    """Gives the remembered value, or remembers a new one.

    It is no buffer: it belongs to the batches that this process sees, so it is neither saved with the params nor
    averaged over ranks. Its address stays, so that a captured step finds what the step before left.
    """

    def __init__(self, tag: str, start: Callable[[Tensor], Tensor] | None = None, detach: bool = True) -> None:
        super().__init__()
        self.tag = tag
        self.start = torch.zeros_like if start is None else start
        self.detach = detach
        self.value: Tensor | None = None

    def forward(self, stream: Tensor, new: Tensor | None = None) -> Tensor:
        if new is not None:
            self._remember(new)
            return new
        if self.value is None:
            return self.start(stream)
        if stream.dim() and self.value.dim() and len(self.value) != len(stream):
            raise InputError(
                f"state '{self.tag}' is of {len(self.value)} samples and this batch has {len(stream)}: "
                "call graph.reset_state() before batches of another size"
            )
        # A copy, since the place is written again before backward has run.
        return self.value.to(stream.device).clone() if self.detach else self.value

    def _remember(self, new: Tensor) -> None:
        if not self.detach:
            self.value = new
            return
        kept = new.detach()
        if self.value is not None and (self.value.shape, self.value.device) == (kept.shape, kept.device):
            self.value.copy_(kept)
        else:
            self.value = kept.clone()

    def reset(self) -> None:
        self.value = None

    def extra_repr(self) -> str:
        return self.tag

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "value": None}
