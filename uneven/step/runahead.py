"""Run-ahead: the host enqueues at most a few steps beyond what its CUDA device has finished.

So speeds, decisions and stop requests follow the device's time and not the host's. On CPU a step is done when
it returns, and this does nothing.
"""

from collections import deque

import torch

DEPTH = 2


class RunAhead:
    """Call `after_step` once per step and `drain` before anything that must see a finished device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in_flight: deque[torch.cuda.Event] = deque()

    def after_step(self) -> None:
        if self._device.type != "cuda":
            return
        finished = torch.cuda.Event(blocking=True)
        finished.record(torch.cuda.current_stream(self._device))
        self._in_flight.append(finished)
        if len(self._in_flight) > DEPTH:
            self._in_flight.popleft().synchronize()

    def drain(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self._in_flight.clear()
