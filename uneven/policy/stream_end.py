"""How ranks of a local policy agree on the end of a stream without length. Used by LocalSGD; idle for other data sets.

Ranks ask the stream's reader for different slots, so one is told of the end before the others. Until all ranks know it
the rank trains no slot past it, and its report in the next round names the epoch's samples. After that round the end is
an event on every rank's axis, like that of an epoch that was known beforehand. Every epoch of such a stream ends with
all ranks there, and each of them has then trained nothing that is not in the average.
"""

from collections.abc import Sequence
from dataclasses import replace

from uneven.policy.axis import Axis, Slot
from uneven.policy.recorded import RecordedSchedule
from uneven.policy.round_report import RoundReport
from uneven.policy.slot_schedule import SlotSchedule
from uneven.policy.stream_axis import StreamAxis


class StreamEnd:
    """What this rank was told of the end of the epoch in progress; `samples` is 0 where it knows of none."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self.samples = 0

    def slot(self, index: int, epoch: int, schedule: SlotSchedule | RecordedSchedule) -> Slot | None:
        """The slot that was handed out; None, and it is kept for the next epoch, where the stream ends before it."""
        axis = self._axis
        slot = axis.slot(index)
        if not isinstance(axis, StreamAxis) or epoch < len(axis.sizes):
            return slot
        self.samples = self.samples or axis.ask(epoch, index)
        if not self.samples:
            return slot
        end = axis.end_of(epoch, self.samples)
        if index >= end:
            assert isinstance(schedule, SlotSchedule), "a replay needs a known length"
            schedule.put_back(end)
            return None
        return replace(slot, samples=min(slot.samples, self.samples - slot.first))

    def learn(self, rows: Sequence[RoundReport], epoch: int) -> None:
        """A round is done: all ranks know what any of them was told."""
        samples = int(max(row.end_samples for row in rows))
        if isinstance(self._axis, StreamAxis) and samples:
            self._axis.learn(epoch, samples)

    def passed(self) -> None:
        """All ranks have passed the end of the epoch."""
        self.samples = 0
