"""Events: the slots at which all ranks synchronize for an evaluation, a checkpoint or the end of an epoch or run.

Both kinds of policy ask here, with slots that are trained: the exact ones after every step, the local ones for the next
event that ends a window. The answer depends on the axis and the settings alone, so it is the same on all ranks.
"""

from dataclasses import dataclass

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

    def evaluates(self, slot: int) -> bool:
        """Whether the model is evaluated here; at the end of the run it always is."""
        return self.evaluation is not None and (self._is_at(self.evaluation, slot) or slot == self.axis.total)

    def saves(self, slot: int) -> bool:
        """Whether a checkpoint is written here; at the end of the run the state is the result."""
        return self.checkpoint is not None and self._is_at(self.checkpoint, slot) and slot != self.axis.total

    def next_event(self, slot: int) -> int:
        """The first slot after this one that needs all ranks at once; the end of the run is its own successor."""
        each = Every(1, "epochs") if self.has_every_epoch else None
        intervals = [every for every in (self.evaluation, self.checkpoint, each) if every is not None]
        return min([self.axis.total, *(self._next(every, slot) for every in intervals)])

    def _is_at(self, every: Every, slot: int) -> bool:
        if every.unit == "steps":
            return slot % every.number == 0
        epochs = self.axis.epochs_before(slot)
        return epochs > 0 and epochs % every.number == 0 and slot == self.axis.epoch_end(epochs - 1)

    def _next(self, every: Every, slot: int) -> int:
        if every.unit == "steps":
            return (slot // every.number + 1) * every.number
        epochs = (self.axis.epochs_before(slot) // every.number + 1) * every.number
        return self.axis.epoch_end(min(epochs, self.axis.epochs) - 1)


def find_events(axis: Axis, config: RunConfig, evaluation: Evaluation | None, is_own_loop: bool) -> Events:
    """The events of a run by its settings; eval_every takes precedence over what `evaluate` was given."""
    evaluated = None if evaluation is None else read_every(config.eval_every or evaluation.every)
    # Nobody knows where the next epoch of a stream without length begins before all ranks have passed this one.
    has_every_epoch = is_own_loop or isinstance(axis, StreamAxis)
    return Events(axis, evaluated, read_every(config.save_every), has_every_epoch)
