"""Asynchronous copies from a device to pinned host memory, for losses, buffers and checksums."""

from collections.abc import Callable

import torch
from torch import Tensor


def copy_to_host_async(tensor: Tensor) -> Callable[[], Tensor]:
    """Start to copy the tensor to pinned memory; the function returned waits for the copy and returns it.

    The caller itself does not wait. Changes to `tensor` that are enqueued later on the same stream are not in the copy.
    """
    if tensor.device.type != "cuda":
        copied = tensor.detach().clone()
        return lambda: copied
    host_copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host_copy.copy_(tensor.detach(), non_blocking=True)
    copy_done = torch.cuda.Event(blocking=True)
    copy_done.record(torch.cuda.current_stream(tensor.device))

    def wait() -> Tensor:
        copy_done.synchronize()
        return host_copy

    return wait
