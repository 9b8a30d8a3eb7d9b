"""The contract between the worker's loop and how ranks stay in step: GradientSync (exact) or LocalSGD (rounds)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from uneven.data.feed import Micros
from uneven.policy.axis import Part
from uneven.policy.finish import Cost
from uneven.policy.ledger import Ledger
from uneven.train.agreement import RankStatus
from uneven.train.inbox import Wish


class Merged(NamedTuple):
    """A round was merged, at this slot."""

    slot: int


class EventCall(NamedTuple):
    """All ranks have passed an epoch or, at slot `step`, come to an event inside it.

    The loss is the mean since the last one, from epoch `first` up to slot `until`: a window of a local policy may span
    several epochs, and then only their common mean is known.
    """

    epoch: int
    loss: float
    first: int
    until: int
    step: int | None = None


class Synchronizer(Protocol):
    """Life cycle: `initialize` once, then `step` and `advance` for every part that `parts` yields, then `finalize`."""

    notes: list[str]  # lines for the user, printed once
    is_stopped: bool  # all ranks end the run here
    wished: Wish  # by any rank, in the last exchange; the same on all of them

    @property
    def epoch(self) -> int:
        """Number of epochs that all ranks have passed."""
        ...

    def initialize(self, costs: Sequence[Cost]) -> None:
        """Round 0: called when all ranks hold rank 0's params and know every rank's measured cost."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on with, as JSON: speeds, shares or windows, learning-rate scale."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """After `initialize`, on the devices that the state is of; on others what was just measured counts."""
        ...

    def ledger(self) -> Ledger:
        """Which slots are trained, by all ranks together; where a run was stopped, a collective."""
        ...

    def reset_timer(self) -> None:
        """Start timing this rank's own work anew; called after anything that is not a training step."""
        ...

    def note_user_time(self, ns: int) -> None:
        """The user's own code ran for so long: no work of this rank, and `user` on ranks that wait for it meanwhile."""
        ...

    def parts(self) -> Iterator[Part]:
        """What this rank trains, in order. An empty part has no samples: a collective is due instead."""
        ...

    def step(self, part: Part, micros: Micros) -> int | None:
        """Train one part; returns the slot that this rank has come to, or None where nothing was trained."""
        ...

    def advance(self, done: int) -> "Merged | EventCall | None":
        """After a step, until it returns None: run the collectives that are due, and say what follows from each.

        Events up to slot `done` are over. After each event the caller says so by `passed`.
        """
        ...

    def event_due(self, done: int) -> EventCall | None:
        """The same without any further collective: an event that a lost rank has interrupted is still due."""
        ...

    def passed(self, is_stopped: bool) -> None:
        """All ranks have been through the event that was due; `is_stopped`: a callback ends the run there."""
        ...

    def begin(self, part: Part) -> None:
        """Before the forward of a part, which a loop of the user's own runs ahead of `step`: set its learning rates,
        and keep what is needed to do it again.
        """
        ...

    def skip_rest(self) -> None:
        """Leave out the rest of the epoch on all ranks: the next `advance` ends it.

        The other ranks learn it in their next collective.
        """
        ...

    def exchange_status(self, status: RankStatus) -> list[RankStatus]:
        """One collective without training, only for the status; returns every rank's, in rank order."""
        ...

    def average_buffers(self) -> None:
        """Make buffers equal on all ranks: before an evaluation, a checkpoint and the end."""
        ...

    def ratio(self) -> tuple[int, ...]:
        """How a common amount of work, such as a test set, is best split over the ranks."""
        ...

    def progress(self) -> dict[str, float]:
        """A few numbers for the progress display; read from the heartbeat's thread."""
        ...

    def finalize(self) -> None:
        """After the last part: all replicas are equal, buffers included."""
        ...

    def close(self) -> None:
        """Remove hooks and end threads, without any collective."""
        ...

    def expect_losses(self) -> None:
        """From now on keep what is needed to go on when a rank is lost (train/elastic/settle.py)."""
        ...

    def own_cost(self) -> Cost | None:
        """What this rank's work costs by now; None where it was not measured."""
        ...

    def go_on_after(self, before: Any, event_loss: float | None) -> None:
        """In a new generation, before `initialize`: what belongs to this rank's replica and not to the group.

        `before` was the synchronizer of the group that was lost; a newcomer has none. `event_loss`: of the event that
        is reached again, by newcomers as well.
        """
        ...
