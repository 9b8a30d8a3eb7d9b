"""Flat gradient buckets: the gradients of several params side by side in memory, so that one collective sums them.

Used by the Reducer (all-reduce) and by the ShardedReducer (reduce-scatter). There is one default bucket size, so that
what a benchmark measures is what `fit` runs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

# Small buckets are sent early, and few full gradients wait in them: before FSDP's became smaller, its peak on CUDA was
# 244.6 MB for 25 M params on four ranks (docs/strategies.md).
DEFAULT_BUCKET_MB = 4.0
UNLIMITED = 1 << 62  # bytes: one bucket for each dtype and device


def bucket_bytes(bucket_mb: float | None) -> int:
    """The bucket size in bytes; None is the default, 0 gives every param a bucket of its own."""
    return int((DEFAULT_BUCKET_MB if bucket_mb is None else bucket_mb) * (1 << 20))


class Bucket:
    """A flat buffer and the params whose gradients are views of it; `extra` are further numbers at its end.

    A bucket without params needs a dtype and a device.
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
        self.pending = 0  # gradients that have not been computed yet


def make_buckets(
    params: Sequence[nn.Parameter], max_bytes: int, extra: int, *, extra_on_host: bool = False
) -> list[Bucket]:
    """Buckets of at most `max_bytes` (a larger param has its own); the last one has `extra` numbers at its end.

    With `extra_on_host` these have a bucket of their own, in host memory.
    """
    groups = split_params(params, max_bytes)
    last = groups[-1]
    if extra_on_host:
        return [*map(Bucket, groups), Bucket([], extra, torch.float64, torch.device("cpu"))]
    if last[0].dtype in (torch.float32, torch.float64):
        return [*map(Bucket, groups[:-1]), Bucket(last, extra)]
    # Half precision would round the extra numbers: they get a bucket of their own.
    return [*map(Bucket, groups), Bucket([], extra, torch.float32, last[0].device)]


def split_params(params: Sequence[nn.Parameter], max_bytes: int) -> list[list[nn.Parameter]]:
    """Params in reverse order, in which backward reaches them, split by size, dtype and device."""
    groups: list[list[nn.Parameter]] = []
    filled = 0
    for param in reversed(params):
        size = param.numel() * param.element_size()
        fits = groups and filled + size <= max_bytes
        if fits and groups[-1][0].dtype == param.dtype and groups[-1][0].device == param.device:
            groups[-1].append(param)
            filled += size
        else:
            groups.append([param])
            filled = size
    return groups


def view_like(param: Tensor, flat: Tensor, start: int) -> Tensor:
    """A range of a flat buffer with the param's shape, and with its strides if the param is dense in memory.

    So a channels_last weight has a channels_last gradient, as autograd would make it.
    """
    if is_dense(param):
        return flat.as_strided(param.shape, param.stride(), flat.storage_offset() + start)
    return flat[start : start + param.numel()].view(param.shape)


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements fill one range of memory, in any order of its dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
