"""By what road a replica's numbers go to the sum and come back."""

from contextlib import AbstractContextManager
from typing import Protocol

from uneven.average.device import DeviceRoad
from uneven.average.host import HostRoad
from uneven.average.replica import Flat, Replica


class Transport(Protocol):
    """`take` belongs to the thread that trains and never waits; the rest to the one that averages, in this order."""

    taken: Flat  # where `take` puts the numbers, beside the params
    snapshot: Flat  # the same numbers, where they are summed; after the sum: what the average changes in them
    average: Flat  # the sum
    change: Flat  # after `load`: the change and ...
    merged: Flat  # ... the average, beside the params

    def take(self) -> None: ...
    def land(self) -> None:
        """Wait until the snapshot can be read."""
        ...

    def at_work(self) -> AbstractContextManager[object]:
        """Inside, what is computed does not queue behind the training."""
        ...

    def load(self) -> None:
        """Bring change and average to the params' device; they are there when this returns. Called inside `at_work`."""
        ...


def make_transport(replica: Replica, is_nccl: bool) -> Transport:
    if replica.device.type == "cuda" and not is_nccl:
        return HostRoad(replica)
    return DeviceRoad(replica)
