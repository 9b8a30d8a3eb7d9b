"""How a replica's flat buffers get to the all-reduce and back: on their own device, or through host memory.

BackgroundAverage uses one of two transports; `make_transport` chooses.

[Note: snapshot synchronisation] The training thread takes a snapshot without waiting and goes on; the averaging thread
reads it later, on another stream or on the host. CUDA orders none of this by itself: without the wait in
`wait_for_snapshot` the sum reads memory that the copy has not reached yet (the snapshot of an earlier round), and
without the one in `copy_to_device` the training stream merges an average that has not been copied. Nothing fails then,
losses only stop falling: the lack of these two waits collapsed training in an earlier system. Both waits happen in the
averaging thread, never in the one that trains. tests/average/test_transport.py delays each copy and fails without its
wait; `verify=True` compares checksums across both.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from uneven.average.replica import Flat, Replica


class Transport(Protocol):
    """The training thread calls `take_snapshot`, which never waits; the averaging thread calls the rest, in this order.

    `device_snapshot`, `delta` and `device_average` are on the params' device. The sum takes place in `snapshot` and
    `average`, which may be on the host, or be the same buffers.
    """

    device_snapshot: Flat  # written by `take_snapshot`
    snapshot: Flat  # the same values where they are summed; after the sum, the delta (average - snapshot)
    average: Flat  # the sum
    agreed: Flat  # the average of the last round that was merged; at first this rank's params
    delta: Flat  # after `copy_to_device`: average - snapshot ...
    device_average: Flat  # ... and the average

    def take_snapshot(self) -> None: ...
    def wait_for_snapshot(self) -> None:
        """Block until `snapshot` can be read, see [Note: snapshot synchronisation]."""
        ...

    def stream(self) -> AbstractContextManager[object]:
        """Inside, kernels and copies are not queued behind those of training."""
        ...

    def copy_to_device(self) -> None:
        """Copy delta and average to the params' device and block until they are there. Called inside `stream`."""
        ...

    def keep(self) -> None:
        """The average was merged: it is the one agreed upon until the next, whose sum goes to another buffer."""
        ...

    def renew(self) -> None:
        """Give up what a sum that was abandoned may still write to, or wait for; snapshot and `agreed` stay."""
        ...


def make_transport(replica: Replica, is_nccl: bool) -> Transport:
    if replica.device.type == "cuda" and not is_nccl:
        return HostTransport(replica)
    return DeviceTransport(replica)


class DeviceTransport:
    """Sums where the params are: in host memory on a CPU, over NCCL on a CUDA device, there on a stream of its own."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._device = replica.device
        self.snapshot, self.agreed = replica.new_flat(), replica.new_flat()
        self.device_snapshot, self.delta = self.snapshot, self.snapshot
        replica.copy_to(self.agreed)
        self._stream: torch.cuda.Stream | None = None
        self._snapshot_taken: torch.cuda.Event | None = None
        if self._device.type == "cuda":
            self._snapshot_taken = torch.cuda.Event(blocking=True)
        self.renew()

    def take_snapshot(self) -> None:
        self._replica.copy_to(self.snapshot)
        if self._snapshot_taken is not None:
            self._snapshot_taken.record(torch.cuda.current_stream(self._device))

    def wait_for_snapshot(self) -> None:
        # By the host, not only by the stream: an NCCL kernel that is enqueued too early spins on processors that
        # training needs.
        if self._snapshot_taken is not None:
            self._snapshot_taken.synchronize()

    @contextmanager
    def stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def copy_to_device(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def keep(self) -> None:
        self.average, self.agreed = self.agreed, self.average
        self.device_average = self.average

    def renew(self) -> None:
        self.average = self.device_average = self._replica.new_flat()
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)


class HostTransport:
    """Sums a CUDA rank's params in host memory.

    The snapshot is first copied on the device, in the training stream, so that training can go on at once; a stream of
    its own then copies it to pinned memory.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._device = replica.device
        self.device_snapshot = self.delta = replica.new_flat()
        self.device_average = replica.new_flat()
        self.snapshot, self.agreed = replica.new_pinned_flat(), replica.new_pinned_flat()
        replica.copy_to(self.device_snapshot)
        self.agreed.buffer.copy_(self.device_snapshot.buffer)
        self.copy_stream = torch.cuda.Stream(self._device)
        self._snapshot_copied = torch.cuda.Event(blocking=True)
        self.renew()

    def take_snapshot(self) -> None:
        self._replica.copy_to(self.device_snapshot)
        self.copy_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self.copy_stream):
            self.snapshot.buffer.copy_(self.device_snapshot.buffer, non_blocking=True)
            self._snapshot_copied.record(self.copy_stream)

    def wait_for_snapshot(self) -> None:
        self._snapshot_copied.synchronize()

    def stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.copy_stream)

    def copy_to_device(self) -> None:
        self.delta.buffer.copy_(self.snapshot.buffer, non_blocking=True)
        self.device_average.buffer.copy_(self.average.buffer, non_blocking=True)
        self.copy_stream.synchronize()

    def keep(self) -> None:
        self.average, self.agreed = self.agreed, self.average

    def renew(self) -> None:
        self.average = self._replica.new_pinned_flat()
