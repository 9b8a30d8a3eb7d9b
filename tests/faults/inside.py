"""Faults that a rank of the storm does to itself: a flipped bit in what it averages, a lock that it does not let go.

Called by the callback of training.py in the rank's own process, at the moment that the case says.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from uneven.average.background import BackgroundAverage


def hold_lock(seconds: float) -> None:
    """No other thread of this process runs Python meanwhile, that of the heartbeats neither."""
    ctypes.PyDLL(None).usleep(int(1e6 * seconds))


def flip_a_bit(numbers: Tensor) -> None:
    with torch.no_grad():
        numbers[:1].view(torch.int64).bitwise_xor_(1)


def flip_next(stage: str, then: Callable[[], None]) -> None:
    """In the next round: a bit of the average that has arrived, or of the snapshot before or while it is sent."""
    is_done = [False]

    def once(numbers: Tensor) -> None:
        if not is_done[0]:
            is_done[0] = True
            flip_a_bit(numbers)
            then()

    compare, send_rows = BackgroundAverage._compare_averages, BackgroundAverage._all_reduce_rows

    def compared(self: BackgroundAverage, average: Tensor, is_suspect: bool) -> None:
        if stage == "average":
            once(average)
        compare(self, average, is_suspect)

    def rows_sent(self: BackgroundAverage, *given: Any) -> None:
        send_rows(self, *given)
        if stage == "snapshot":
            once(self.transport.snapshot.buffer)
        elif stage == "sent snapshot" and not is_done[0]:
            self._group = _FlipsInSum(self._group, lambda: once(self.transport.snapshot.buffer))  # type: ignore

    BackgroundAverage._compare_averages = compared  # type: ignore[method-assign]
    BackgroundAverage._all_reduce_rows = rows_sent  # type: ignore[method-assign]


class _FlipsInSum:
    """Its next sum changes a bit of something else."""

    def __init__(self, inner: Any, flip: Callable[[], None]) -> None:
        self._inner, self._flip = inner, flip

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_reduce(self, tensor: Tensor) -> Any:
        self._flip()
        return self._inner.all_reduce(tensor)
