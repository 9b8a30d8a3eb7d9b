"""The contract between the worker's loop and how ranks stay in step: GradientSync (exact) or LocalSGD (rounds)."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntFlag
from typing import Any, Protocol

from uneven.data.feed import Micros
from uneven.policy.axis import Part
from uneven.policy.finish import Cost
from uneven.policy.ledger import Ledger
from uneven.train.status import RankStatus

AfterSlot = Callable[[int], int]  # called with the slots trained; returns the ns that it took


class Wish(IntFlag):
    """What a rank wants at the next slot where all ranks can meet: it travels in the sum that ranks exchange anyway."""

    NONE = 0
    SAVE = 1  # an interval of time is over, or the user asked for a checkpoint
    EVALUATE = 2
    LEAVE = 4  # the rank leaves the run; what it has trained is in this very exchange (train/elastic/leaving.py)


def no_wish() -> Wish:
    return Wish.NONE


def no_wait() -> None:
    """What is called before params change where no checkpoint is being taken."""


def wished(values: Iterable[float]) -> Wish:
    """What any rank wants, of the numbers that arrived."""
    found = 0
    for value in values:
        found |= int(value)
    return Wish(found) if found else Wish.NONE


def no_callback(slot: int) -> int:
    """What is called after a step or round where there are no callbacks."""
    del slot
    return 0


class EpochEnd(Protocol):
    """Called on every rank when all ranks have passed an epoch, or an event at slot `step` inside it.

    The loss is the mean since the last call, from epoch `first` up to slot `until`: a window of a local policy may
    span several epochs, and then only their common mean is known. Returns whether all ranks stop here.
    """

    def __call__(self, epoch: int, loss: float, *, first: int, until: int, step: int | None = None) -> bool: ...


class Synchronizer(Protocol):
    """Life cycle: `initialize` once, then `train` for every part that `parts` yields, then `finalize`."""

    notes: list[str]  # lines for the user, printed once
    after_step: AfterSlot  # after every step of this rank
    after_round: AfterSlot  # after a round was merged, with its slot
    wish: Callable[[], Wish]  # asked in every exchange
    before_change: Callable[[], None]  # before params are changed outside the optimizer's step
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

    def train(self, part: Part, micros: Micros) -> bool:
        """Train one part and run the collectives due after it; returns whether the run stops here."""
        ...

    def begin(self, part: Part) -> None:
        """Before the forward of a part, which a loop of the user's own runs ahead of `train`: set its learning rates,
        and keep what is needed to do it again.
        """
        ...

    def skip_rest(self) -> bool:
        """Leave out the rest of the epoch on all ranks, and end it; returns whether the run stops here.

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

    def reach_event(self, done: int) -> bool:
        """Reach the event at the present slot, if there is one after slot `done`; returns whether the run stops."""
        ...
