"""Observing the communication of a strategy's steps, ours or PyTorch's: comm/observed.py, and the end of backward.

Used by `uneven bench strategies`.
"""

import time
from typing import Any

from torch import Tensor

from uneven.comm.observed import Observed, observe_collectives
from uneven.parallel.hooks import at_the_end_of_backward

__all__ = ["BackwardTail", "Observed", "observe_collectives"]


class BackwardTail:
    """Runs one backward; from its last gradient until it returns counts as a wait, as far as a collective is on."""

    def __init__(self, observed: Observed) -> None:
        self._observed = observed
        self._began = 0.0

    def __call__(self, loss: Tensor) -> None:
        # Callbacks run in the order in which they are queued, and DDP queues its own with the last gradient.
        handle: Any = loss.register_hook(lambda _: at_the_end_of_backward(self._mark))
        loss.backward()
        handle.remove()
        self._observed.waits.append((self._began, time.perf_counter()))

    def _mark(self) -> None:
        self._began = time.perf_counter()
