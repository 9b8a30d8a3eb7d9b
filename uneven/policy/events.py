"""Events: the slots at which all ranks synchronize for an evaluation, a checkpoint or the end of an epoch or run.

Both kinds of policy ask here, with slots that are trained: the exact ones after every step, the local ones for the next
event that ends a window. The answer depends on the axis, the settings and what was requested on all ranks alike, so
it is the same on all ranks. An interval of time has no slots of its own: whoever keeps the clock requests one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from uneven.config import Evaluation, Every, RunConfig, read_every
from uneven.policy.axis import Axis
from uneven.policy.stream_axis import StreamAxis


@dataclass(frozen=True, slots=True)
class Events:
    """The intervals of a run, None where there is none. `slot` is always the number of slots that are trained."""

    axis: Axis
    evaluation: Every | None = None
    checkpoint: Every | None = None
    has_every_epoch: bool = False  # in a loop of the user's own, and on a stream without length
    extra_saves: set[int] = field(default_factory=set, compare=False)
    extra_evaluations: set[int] = field(default_factory=set, compare=False)

    def request_save(self, slot: int) -> None:
        """Write a checkpoint at this slot, too: on all ranks, before any of them has passed it.

        first_free_slot in policy/slot_schedule.py finds such a slot in the local policies.
        """
        self.extra_saves.add(slot)

    def request_evaluation(self, slot: int) -> None:
        """Evaluate at this slot, too; as `request_save`."""
        self.extra_evaluations.add(slot)

    def take_requests(self, saves: Iterable[int], evaluations: Iterable[int]) -> None:
        """What was requested on another rank takes the place of what this one knows."""
        for own, others in ((self.extra_saves, saves), (self.extra_evaluations, evaluations)):
            own.clear()
            own.update(others)

    def evaluates(self, slot: int) -> bool:
        """Whether the model is evaluated here; at the end of the run it always is."""
        if self.evaluation is None:
            return False
        return self._is_at(self.evaluation, slot) or slot in self.extra_evaluations or slot == self.axis.total

    def saves(self, slot: int) -> bool:
        """Whether a checkpoint is written here; with an interval also at the end, for a longer run to go on from."""
        is_asked = self.checkpoint is not None and (self._is_at(self.checkpoint, slot) or slot == self.axis.total)
        return is_asked or slot in self.extra_saves

    def has_entry(self, slot: int) -> bool:
        """Whether the history gets an entry here: after an evaluation and every epoch, not for a checkpoint alone."""
        return self.evaluates(slot) or slot == self.axis.epoch_end(max(0, self.axis.epochs_before(slot) - 1))

    def next_event(self, slot: int) -> int:
        """The first slot after this one that needs all ranks at once; the end of the run is its own successor."""
        each = Every(1, "epochs") if self.has_every_epoch else None
        intervals = [every for every in (self.evaluation, self.checkpoint, each) if every is not None]
        extra = self.extra_saves if self.evaluation is None else self.extra_saves | self.extra_evaluations
        requested = (one for one in extra if one > slot)
        found = min([self.axis.total, *(self._next(every, slot) for every in intervals)])
        return min(found, min(requested, default=found))

    def _is_at(self, every: Every, slot: int) -> bool:
        if every.unit == "seconds":
            return False
        if every.unit == "steps":
            return slot % every.number == 0
        epochs = self.axis.epochs_before(slot)
        return epochs > 0 and epochs % every.number == 0 and slot == self.axis.epoch_end(epochs - 1)

    def _next(self, every: Every, slot: int) -> int:
        if every.unit == "seconds":
            return self.axis.total
        number = int(every.number)
        if every.unit == "steps":
            return (slot // number + 1) * number
        epochs = (self.axis.epochs_before(slot) // number + 1) * number
        return self.axis.epoch_end(min(epochs, self.axis.epochs) - 1)


def find_events(axis: Axis, config: RunConfig, evaluation: Evaluation | None, is_own_loop: bool) -> Events:
    """The events of a run by its settings; eval_every takes precedence over what `evaluate` was given."""
    evaluated = None if evaluation is None else read_every(config.eval_every or evaluation.every)
    # Nobody knows where the next epoch of a stream without length begins before all ranks have passed this one.
    has_every_epoch = is_own_loop or isinstance(axis, StreamAxis)
    return Events(axis, evaluated, read_every(config.save_every), has_every_epoch)
