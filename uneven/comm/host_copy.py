"""Numbers on their way from a device to host memory, while the device goes on computing."""

from collections.abc import Callable

import torch
from torch import Tensor


def copy_to_host_async(numbers: Tensor) -> Callable[[], Tensor]:
    """The numbers as they are now, on the host: whoever calls the result waits for them, nobody else does.

    Later changes of `numbers` in the same stream do not reach the copy.
    """
    if numbers.device.type != "cuda":
        copied = numbers.detach().clone()
        return lambda: copied
    host_copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host_copy.copy_(numbers.detach(), non_blocking=True)
    arrival = torch.cuda.Event(blocking=True)
    arrival.record(torch.cuda.current_stream(numbers.device))

    def wait() -> Tensor:
        arrival.synchronize()
        return host_copy

    return wait
