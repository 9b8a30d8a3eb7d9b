"""Run-ahead: the host enqueues at most a few steps beyond what its CUDA device has finished.

So measured speeds, decisions and stop requests follow the device's progress, not the host's. On a CPU a step is done
when it returns, and this does nothing. It also records when the device was busy with steps, for the timeline; gaps
between the kernels of one step count as busy.
"""

import time
from collections import deque

import torch

DEPTH = 2
# If enqueuing takes less than this part of a step, one step ahead keeps the device busy, and averages are merged
# one step sooner.
SHORT_ENQUEUE = 0.4
BASE_AGE_NS = 1_000_000_000  # then the clocks of host and device are compared again, where the device is idle ...
MAX_BASE_AGE_NS = 10_000_000_000  # ... and anyway


class RunAhead:
    """Call `after_step` once per step and `drain` before anything that must see a finished device.

    `busy` holds when the device was busy with steps, as ordered and disjoint (start, end) in ns of `perf_counter`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in_flight: deque[tuple[torch.cuda.Event, int | None]] = deque()
        self._host_s = self._step_s = 0.0  # moving averages over steps: time to enqueue, and in all
        self._left_s = time.perf_counter()
        self.busy: list[tuple[int, int]] = []
        self._reached: torch.cuda.Event | None = None
        self._base: tuple[torch.cuda.Event, int] | None = None  # an event, and its time on the host's clock

    def after_step(self, began_ns: int | None = None) -> None:
        """`began_ns`: when the host began to enqueue the step; None leaves the step out of `busy`."""
        if self._device.type != "cuda":
            return
        arrived_s = time.perf_counter()
        if self._base is None:
            self._set_base()
        finished = torch.cuda.Event(enable_timing=True, blocking=True)
        finished.record(torch.cuda.current_stream(self._device))
        self._in_flight.append((finished, began_ns))
        while len(self._in_flight) > (1 if self._host_s < SHORT_ENQUEUE * self._step_s else DEPTH):
            self._finish()
        left_s = time.perf_counter()
        self._host_s += 0.1 * (arrived_s - self._left_s - self._host_s)
        self._step_s += 0.1 * (left_s - self._left_s - self._step_s)
        self._left_s = left_s

    @property
    def behind(self) -> int:
        """Enqueued steps that the device has not finished."""
        return sum(not finished.query() for finished, _ in self._in_flight)

    def catch_up(self) -> None:
        """Wait for the compute stream, but not for collectives and copies on other streams.

        Called before the rank's own work is timed: until then the host has only enqueued it.
        """
        if self._device.type == "cuda":
            if self._reached is None:
                # Not blocking: all other ranks wait for this one, and to be put to sleep and woken takes some 50 us.
                self._reached = torch.cuda.Event()
            self._reached.record(torch.cuda.current_stream(self._device))
            self._reached.synchronize()
            self._finish_all()

    def drain(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self._finish_all()

    def _finish_all(self) -> None:
        while self._in_flight:
            self._finish()
        if self._base is not None and time.perf_counter_ns() - self._base[1] > BASE_AGE_NS:
            self._set_base()  # the two clocks drift; the device is idle now

    def _finish(self) -> None:
        """Wait for the oldest step, and record when the device was busy with it."""
        finished, began_ns = self._in_flight.popleft()
        was_waited_for = not finished.query()
        finished.synchronize()
        now_ns = time.perf_counter_ns()
        if began_ns is None or self._base is None:
            return
        base, base_ns = self._base
        if was_waited_for and now_ns - base_ns > MAX_BASE_AGE_NS:
            self._base = (finished, now_ns)
        end_ns = base_ns + int(base.elapsed_time(finished) * 1e6)
        last_ns = self.busy[-1][1] if self.busy else 0
        # A step starts when it is enqueued and the one before is done.
        if began_ns <= last_ns < end_ns:
            self.busy[-1] = (self.busy[-1][0], end_ns)
        elif last_ns < began_ns < end_ns:
            self.busy.append((began_ns, end_ns))

    def _set_base(self) -> None:
        base = torch.cuda.Event(enable_timing=True)
        base.record(torch.cuda.current_stream(self._device))
        base.synchronize()
        self._base = (base, time.perf_counter_ns())
