"""Run-ahead: the host enqueues at most a few steps beyond what its CUDA device has finished.

So speeds, decisions and stop requests follow the device's time and not the host's. On CPU a step is done when
it returns, and this does nothing.
"""

import time
from collections import deque

import torch

DEPTH = 2
# Where enqueuing takes less than this part of a step, one step ahead keeps the device busy, and averages are merged
# sooner by the time of another one.
SHORT = 0.4


class RunAhead:
    """Call `after_step` once per step and `drain` before anything that must see a finished device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in_flight: deque[torch.cuda.Event] = deque()
        self._host_s = self._step_s = 0.0  # of a step: what enqueuing takes, and all of it
        self._left_s = time.perf_counter()

    def after_step(self) -> None:
        if self._device.type != "cuda":
            return
        arrived_s = time.perf_counter()
        finished = torch.cuda.Event(blocking=True)
        finished.record(torch.cuda.current_stream(self._device))
        self._in_flight.append(finished)
        while len(self._in_flight) > (1 if self._host_s < SHORT * self._step_s else DEPTH):
            self._in_flight.popleft().synchronize()
        left_s = time.perf_counter()
        self._host_s += 0.1 * (arrived_s - self._left_s - self._host_s)
        self._step_s += 0.1 * (left_s - self._left_s - self._step_s)
        self._left_s = left_s

    @property
    def behind(self) -> int:
        """Steps that the device may still have to do."""
        return len(self._in_flight)

    def catch_up(self) -> None:
        """Wait for what is enqueued on the compute stream, and not for collectives and copies on other ones.

        Before the rank's own work is timed: up to then the host has only asked for it.
        """
        if self._device.type == "cuda":
            reached = torch.cuda.Event(blocking=True)
            reached.record(torch.cuda.current_stream(self._device))
            reached.synchronize()
            self._in_flight.clear()

    def drain(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self._in_flight.clear()
