"""The axis: a run's progress as one integer, the slot.

A slot is the position of one optimizer step in the whole run. Invariant: slots never cross an epoch, so the last slot
of an epoch may be short, and every sample of an epoch lies in exactly one slot. Where `max_slots` ends the run inside
an epoch, that epoch is the last and is left unfinished. Pure arithmetic: no torch, no clock. All other rooms count
progress with it: policies, feeds, checkpoints, LR schedules.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot: positions [first, first + samples) of its epoch's permutation."""

    index: int
    epoch: int
    first: int
    samples: int

    @property
    def stop(self) -> int:
        return self.first + self.samples


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's samples of a slot: `samples` positions from `first`, in micro-batches of at most `batch`."""

    slot: Slot
    first: int
    samples: int
    batch: int

    @property
    def stop(self) -> int:
        return self.first + self.samples

    @property
    def sizes(self) -> list[int]:
        """The micro-batches' sizes: full ones, then the rest."""
        full, rest = divmod(self.samples, self.batch)
        return [self.batch] * full + [rest] * (rest > 0)


def part_of(slot: Slot, shares: Sequence[int], rank: int, batch: int) -> Part:
    """The rank's part of a slot that is divided by shares in rank order."""
    return Part(slot, slot.first + sum(shares[:rank]), shares[rank], batch)


@dataclass(frozen=True, slots=True)
class Axis:
    """All slots of a run over `samples` samples an epoch, `slot_size` samples a slot; at most `max_slots` of them.

    `epochs` becomes the number of epochs that are begun.
    """

    samples: int
    slot_size: int
    epochs: int
    max_slots: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if min(self.samples, self.slot_size, self.epochs, self.max_slots or 1) < 1:
            raise ValueError(f"samples, slot_size and epochs of an axis must be at least 1, got {self}")
        if self.max_slots is not None:
            object.__setattr__(self, "epochs", min(self.epochs, -(-self.max_slots // self.slots_per_epoch)))

    @property
    def slots_per_epoch(self) -> int:
        return -(-self.samples // self.slot_size)

    @property
    def total(self) -> int:
        slots = self.slots_per_epoch * self.epochs
        return slots if self.max_slots is None else min(slots, self.max_slots)

    @property
    def total_samples(self) -> int | None:
        """Of all epochs together; None while a stream without length has not ended (stream_axis.py)."""
        return self.samples_before(self.total)

    @property
    def epoch_samples(self) -> int:
        """Samples of the first epoch, which are those of every epoch unless a stream's length varies."""
        return self.samples

    def slot(self, index: int) -> Slot:
        epoch, place = divmod(index, self.slots_per_epoch)
        first = place * self.slot_size
        return Slot(index, epoch, first, min(self.slot_size, self.samples - first))

    def slots(self, start: int = 0, stop: int | None = None) -> Iterator[Slot]:
        return (self.slot(index) for index in range(start, self.total if stop is None else stop))

    def samples_before(self, index: int) -> int:
        """Global samples trained when all slots before `index` are done."""
        epoch, place = divmod(index, self.slots_per_epoch)
        return epoch * self.samples + place * self.slot_size

    @property
    def schedule_length(self) -> int:
        """The number of steps of an LR schedule over the whole run: one a slot, as one device alone would make them."""
        return self.total

    def epoch_end(self, epoch: int) -> int:
        """The slot index at which an epoch is over: trained in full, or the last one up to the end of the run."""
        return min((epoch + 1) * self.slots_per_epoch, self.total)

    def ends_epoch(self, index: int) -> bool:
        """Whether an epoch is trained in full when all slots before `index` are done."""
        return index > 0 and index % self.slots_per_epoch == 0

    def epochs_before(self, index: int) -> int:
        """How many epochs are over when all slots before `index` are done."""
        return self.epochs if index >= self.total else index // self.slots_per_epoch


@dataclass(frozen=True, slots=True)
class BatchAxis(Axis):
    """An axis whose slots are the batches of a batch sampler: `batches` an epoch, of any sizes.

    `offsets(epoch)` gives the position at which each batch begins, and the epoch's end. Every epoch has as many
    batches and samples; `slot_size` is the size that costs are measured at.
    """

    batches: int
    offsets: Callable[[int], Sequence[int]]

    @property
    def slots_per_epoch(self) -> int:
        return self.batches

    def slot(self, index: int) -> Slot:
        epoch, place = divmod(index, self.batches)
        first, stop = self.offsets(epoch)[place : place + 2]
        return Slot(index, epoch, first, stop - first)

    def samples_before(self, index: int) -> int:
        epoch, place = divmod(index, self.batches)
        return epoch * self.samples + (self.offsets(epoch)[place] if place else 0)
