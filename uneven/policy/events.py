"""Events: the slots at which all ranks synchronize for an evaluation, a checkpoint or the end of an epoch or run.

Both kinds of policy ask here, with slots that are trained: the exact ones after every step, the local ones for the next
event that ends a window. The answer depends on the axis and the settings alone, so it is the same on all ranks.
"""

from dataclasses import dataclass

from uneven.config import Evaluation, Every, RunConfig, read_every
from uneven.policy.axis import Axis


@dataclass(frozen=True, slots=True)
class Events:
    """Intervals in slots, None where there is none. `slot` is always the number of slots that are trained."""

    axis: Axis
    evaluation: int | None = None
    checkpoint: int | None = None
    is_own_loop: bool = False  # the user's loop sees the end of every epoch

    def evaluates(self, slot: int) -> bool:
        """Whether the model is evaluated here; at the end of the run it always is."""
        return self.evaluation is not None and (slot % self.evaluation == 0 or slot == self.axis.total)

    def saves(self, slot: int) -> bool:
        """Whether a checkpoint is written here; at the end of the run the state is the result."""
        return self.checkpoint is not None and slot % self.checkpoint == 0 and slot != self.axis.total

    def next_event(self, slot: int) -> int:
        """The first slot after this one that needs all ranks at once; the end of the run is its own successor."""
        epoch = self.axis.slots_per_epoch if self.is_own_loop else None
        intervals = [each for each in (self.evaluation, self.checkpoint, epoch) if each is not None]
        return min([self.axis.total, *((slot // each + 1) * each for each in intervals)])


def find_events(axis: Axis, config: RunConfig, evaluation: Evaluation | None, is_own_loop: bool) -> Events:
    """The events of a run by its settings; eval_every takes precedence over what `evaluate` was given."""

    def slots(every: Every | None) -> int | None:
        return None if every is None else every.number * (axis.slots_per_epoch if every.unit == "epochs" else 1)

    evaluated = None if evaluation is None else read_every(config.eval_every or evaluation.every)
    return Events(axis, slots(evaluated), slots(read_every(config.checkpoint_every)), is_own_loop)
