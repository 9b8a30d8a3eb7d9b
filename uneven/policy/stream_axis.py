"""The axis of a stream without length: where an epoch ends becomes known when its end has been read.

The one reader of the stream (data/reader.py) says where that is, so every rank gets the same answer. In the exact
policies all ranks ask for every slot in order, and agree by that alone. In the local policies ranks ask for different
slots, so the end one of them was told travels in its next round, and all ranks learn it there (train/local_sgd.py).
Invariant: slots of an epoch whose end is not known are full ones.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

from uneven.policy.axis import Axis, Slot

UNBOUNDED_SLOTS = 1000
UNKNOWN = 1 << 52  # in place of a slot or a number of samples that nobody knows yet; still exact as a float


class StreamAxis(Axis):
    """Life cycle: `connect` when the group has formed, before the first slot; then epochs are learnt one by one."""

    sizes: list[int]  # samples of the epochs whose end is known
    _ends: list[int]  # the slots at which they end
    _ask: list[Callable[[int, int, int], int]]

    def __init__(self, slot_size: int, epochs: int, max_slots: int | None = None) -> None:
        super().__init__(UNKNOWN, slot_size, epochs)
        object.__setattr__(self, "max_slots", max_slots)
        object.__setattr__(self, "sizes", [])
        object.__setattr__(self, "_ends", [])
        object.__setattr__(self, "_ask", [])

    def connect(self, ask: Callable[[int, int, int], int]) -> None:
        """`ask(epoch, first, count)`: the samples of an epoch if it ends within `count` samples from `first`, else 0.

        It waits until so much has been read.
        """
        self._ask[:] = [ask]

    @property
    def slots_per_epoch(self) -> int:
        return UNKNOWN  # epochs may differ: epochs_before and epoch_end tell

    @property
    def total(self) -> int:
        return min(self._ends[-1] if len(self._ends) == self.epochs else UNKNOWN, self.max_slots or UNKNOWN)

    @property
    def total_samples(self) -> int | None:
        return self.samples_before(self.total) if len(self.sizes) == self.epochs else None

    @property
    def epoch_samples(self) -> int:
        return self.sizes[0] if self.sizes else 0

    @property
    def schedule_length(self) -> int:
        return self.max_slots or UNKNOWN

    def slot(self, index: int) -> Slot:
        epoch = bisect_right(self._ends, index)
        first = (index - self._start(epoch)) * self.slot_size
        left = self.sizes[epoch] - first if epoch < len(self.sizes) else self.slot_size
        return Slot(index, epoch, first, min(self.slot_size, left))

    def slots(self, start: int = 0, stop: int | None = None) -> Iterator[Slot]:
        """Every slot of the run in order; each waits until the stream has been read so far."""
        index = start
        while index < (self.total if stop is None else stop):
            if bisect_right(self._ends, index) == len(self.sizes) and (samples := self.ask(len(self.sizes), index)):
                self.learn(len(self.sizes), samples)
            yield self.slot(index)
            index += 1

    def ask(self, epoch: int, index: int) -> int:
        """The samples of the epoch if the slot is its last or lies past its end, else 0; does not change the axis."""
        return self._ask[0](epoch, (index - self._start(epoch)) * self.slot_size, self.slot_size)

    def learn(self, epoch: int, samples: int) -> None:
        """All ranks know that the epoch has so many samples."""
        if epoch == len(self.sizes):
            self._ends.append(self.end_of(epoch, samples))
            self.sizes.append(samples)

    def learn_all(self, sizes: Sequence[int]) -> None:
        """Of another rank, or a checkpoint."""
        for epoch, samples in enumerate(sizes):
            self.learn(epoch, samples)

    def end_of(self, epoch: int, samples: int) -> int:
        """The slot at which the epoch ends if it has so many samples."""
        return self._start(epoch) - (-samples // self.slot_size)

    def samples_before(self, index: int) -> int:
        epoch = bisect_right(self._ends, index)
        return sum(self.sizes[:epoch]) + (index - self._start(epoch)) * self.slot_size

    def epochs_before(self, index: int) -> int:
        over = bisect_right(self._ends, index)
        is_cut = index >= self.total and index > self._start(over)  # `max_slots` ends the run inside an epoch
        return over + is_cut

    def ends_epoch(self, index: int) -> bool:
        return index in self._ends

    def epoch_end(self, epoch: int) -> int:
        known = self._start(epoch + 1) if epoch < len(self._ends) else UNKNOWN
        return min(known, self.max_slots or UNKNOWN)

    def _start(self, epoch: int) -> int:
        return self._ends[epoch - 1] if epoch else 0


def expected_samples(axis: Axis) -> int:
    """The samples of the whole run; of a stream without length as if it had `max_slots`, or UNBOUNDED_SLOTS, slots."""
    total = axis.total_samples
    if isinstance(axis, StreamAxis) or total is None:
        return (axis.max_slots or UNBOUNDED_SLOTS) * axis.slot_size
    return total
