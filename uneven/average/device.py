"""The road of an average that is summed where the params live: over Gloo on a CPU, over NCCL on a CUDA device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from uneven.average.replica import Replica


class DeviceRoad:
    """See road.Road. On CUDA the sum has a stream of its own; training goes on in another."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._device = replica.device
        self.snapshot, self.average = replica.flat(), replica.flat()
        self.taken, self.change, self.merged = self.snapshot, self.snapshot, self.average
        self._stream, self._left = _stream_and_event(self._device)

    def take(self) -> None:
        self._replica.take(self.snapshot)
        if self._left is not None:
            self._left.record(torch.cuda.current_stream(self._device))

    def land(self) -> None:
        # An NCCL kernel that is enqueued before its turn spins on the processors that training needs.
        if self._left is not None:
            self._left.synchronize()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def load(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def _stream_and_event(device: torch.device) -> tuple[torch.cuda.Stream | None, torch.cuda.Event | None]:
    if device.type != "cuda":
        return None, None
    return torch.cuda.Stream(device), torch.cuda.Event(blocking=True)
