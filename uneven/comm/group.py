"""The process group: this rank, the world size, and the collectives.

Every collective of the project goes through a Group, and this folder is the only importer of torch.distributed. All
ranks must start the same collectives in the same order; nothing here checks that.
"""

from typing import Protocol

from torch import Tensor

from uneven.comm.lost import Lost
from uneven.comm.work import Traffic, Work


class Group(Protocol):
    """Collectives over all ranks, in place and asynchronous: the tensor holds the result after `wait()`.

    A group belongs to one `generation` of its run. When a rank is lost or joins, it is given up, and the next one is
    formed (comm/form.py): whatever waits in it raises a GroupLostError, and so does whoever starts a collective.
    """

    rank: int
    world_size: int
    generation: int
    traffic: Traffic
    # Whether a sum of a few numbers on the host costs next to nothing, so that they need not ride with gradients.
    has_cheap_host_sums: bool

    def all_reduce(self, tensor: Tensor) -> Work: ...
    def all_reduce_max(self, tensor: Tensor) -> Work: ...
    def broadcast(self, tensor: Tensor, owner: int = 0) -> Work:
        """The owner's values to all ranks."""
        ...

    def reduce(self, tensor: Tensor, owner: int) -> Work:
        """The sum of all ranks' values at the owner; what the others then hold is undefined."""
        ...

    def is_nccl(self, tensor: Tensor) -> bool:
        """Whether collectives on this tensor use NCCL."""
        ...

    def new_group(self) -> "Group":
        """A group of the same ranks whose collectives do not queue behind this one's. Called on all ranks."""
        ...

    def claim(self, count: int) -> int:
        """Claim the next `count` numbers of a counter that all ranks share; returns the first. Waits for no rank.

        By one thread at a time, which need not be the one that runs the collectives.
        """
        ...

    def abort(self, why: str) -> None:
        """Give up this group and all that were made from it: GroupLostError(why) in all their collectives, those that
        some thread waits for and later ones. By any thread, at any time; returns at once. `close` comes after it.
        """
        ...

    def close(self) -> None:
        """Leave the group and those made from it. Waits for no peer, whatever is under way."""
        ...


class SoloGroup:
    """A group of one rank: collectives return at once and send nothing."""

    rank = 0
    world_size = 1
    has_cheap_host_sums = True

    def __init__(self, generation: int = 0) -> None:
        self.generation = generation
        self.traffic = Traffic()
        self._lost = Lost()
        self._claimed = 0

    def all_reduce(self, tensor: Tensor) -> Work:
        self._lost.check()
        return Work(_CompletedWork(), tensor, Traffic())

    all_reduce_max = all_reduce

    def broadcast(self, tensor: Tensor, owner: int = 0) -> Work:
        assert owner == 0
        return self.all_reduce(tensor)

    reduce = broadcast

    def is_nccl(self, tensor: Tensor) -> bool:
        del tensor
        return False

    def new_group(self) -> "SoloGroup":
        twin = SoloGroup(self.generation)
        twin._lost = self._lost
        return twin

    def claim(self, count: int) -> int:
        self._claimed += count
        return self._claimed - count

    def abort(self, why: str) -> None:
        """A newcomer makes a new generation: the rank that was alone hears of it at its next collective."""
        self._lost.abort(why)

    def close(self) -> None: ...


class _CompletedWork:
    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return True
