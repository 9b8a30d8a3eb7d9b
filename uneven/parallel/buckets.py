"""Flat buckets: gradients of several params side by side in memory, so that one collective carries them all."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

BUCKET_BYTES = 4 << 20  # small ones leave early, and few full gradients wait in them
UNLIMITED = 1 << 62  # one bucket for all


class Bucket:
    """A flat buffer and the params whose gradients are its views; `extra` numbers stand at its end.

    A bucket without params must be told its type and device.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        extra: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.params = list(params)
        size = sum(p.numel() for p in params)
        self.buffer = torch.zeros(
            size + extra,
            dtype=params[0].dtype if dtype is None else dtype,
            device=params[0].device if device is None else device,
        )
        self.extra = self.buffer[size:]
        self.views = []
        start = 0
        for param in params:
            self.views.append(view_like(param, self.buffer, start))
            start += param.numel()
        self.missing = 0


def view_like(param: Tensor, flat: Tensor, start: int) -> Tensor:
    """A range of a flat buffer in the shape of the param, and with its strides where these fill a range.

    So a channels_last weight has a channels_last gradient, as autograd would make it.
    """
    if is_filled(param):
        return flat.as_strided(param.shape, param.stride(), flat.storage_offset() + start)
    return flat[start : start + param.numel()].view(param.shape)


def is_filled(tensor: Tensor) -> bool:
    """Whether the tensor's elements lie side by side in memory, in whatever order of its dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def cut_buckets(params: Sequence[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Params in reverse order, the order backward reaches them, cut by size, type and device."""
    groups: list[list[nn.Parameter]] = []
    filled = 0
    for param in reversed(params):
        size = param.numel() * param.element_size()
        fits = groups and filled + size <= bucket_bytes
        if fits and groups[-1][0].dtype == param.dtype and groups[-1][0].device == param.device:
            groups[-1].append(param)
            filled += size
        else:
            groups.append([param])
            filled = size
    return groups
