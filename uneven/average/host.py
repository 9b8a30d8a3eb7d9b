"""The road of a CUDA rank's average that is summed in host memory: down, over Gloo, and up again.

A snapshot is copied aside on the device first, in the stream that trains, so that training goes on at once; a stream
of its own carries it to pinned memory. What the host reads must have landed and what it wrote must have been loaded
before either is touched again: both are waited for in the thread that averages, never in the one that trains.
"""

from contextlib import AbstractContextManager

import torch

from uneven.average.replica import Replica


class HostRoad:
    """See road.Road."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._device = replica.device
        self.taken = self.change = replica.flat()  # on the device: the snapshot, and later what the average changes
        self.merged = replica.flat()
        self.snapshot, self.average = replica.host_flat(), replica.host_flat()
        self.copying = torch.cuda.Stream(self._device)
        self._landed = torch.cuda.Event(blocking=True)

    def take(self) -> None:
        self._replica.take(self.taken)
        self.copying.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self.copying):
            self.snapshot.numbers.copy_(self.taken.numbers, non_blocking=True)
            self._landed.record(self.copying)

    def land(self) -> None:
        self._landed.synchronize()

    def at_work(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.copying)  # in the other one a copy would queue behind the training

    def load(self) -> None:
        self.change.numbers.copy_(self.snapshot.numbers, non_blocking=True)
        self.merged.numbers.copy_(self.average.numbers, non_blocking=True)
        self.copying.synchronize()
