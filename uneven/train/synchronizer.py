"""The contract between the worker's loop and how ranks stay in step: GradientSync (exact) or LocalSGD (rounds).

And what both tell the user of a device that became too slow to help: when it is left out, and when it is back. The
policies decide (policy/exact.py, policy/windows.py), on all ranks alike; the lines are printed once, and the timeline
has an event for each in the device's own lane.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from uneven.average.buffers import BufferAverage
from uneven.data.feed import Micros
from uneven.policy.axis import Part
from uneven.policy.finish import Cost
from uneven.policy.ledger import Ledger
from uneven.timeline.record import Recorder
from uneven.train.agreement import RankStatus
from uneven.train.inbox import Wish
from uneven.train.rank_info import RankInfo


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
    buffers: BufferAverage
    is_local: bool
    event_loss: float | None  # of the event that is being reached
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

    @property
    def done(self) -> int:
        """How far this rank is: steps that it has applied, or rounds that it has merged."""
        ...

    @property
    def has_handed_in(self) -> bool:
        """Whether the others have all that this rank has trained, or are about to."""
        ...

    def abandon(self) -> "Merged | None":
        """The group is lost: keep what can be kept without it, in no collective."""
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


MOST_LINES = 3  # a rank: one at the edge of use goes in and out, and the timeline has the rest


class Stragglers:
    """`follow` with every change of the shares or counts, in order. A rank that never had any is no straggler."""

    def __init__(self, recorder: Recorder, rank_info: RankInfo, shares: Sequence[int]) -> None:
        self._recorder, self._rank_info = recorder, rank_info
        self._took_part = [share > 0 for share in shares]
        self._is_out = [False] * rank_info.world_size
        self._lines = [0] * rank_info.world_size

    def follow(self, slot: int, shares: Sequence[int]) -> list[str]:
        """The shares from this slot on; returns lines to print."""
        lines = []
        for rank, share in enumerate(shares):
            is_out = share == 0 and self._took_part[rank]
            self._took_part[rank] |= share > 0
            if is_out == self._is_out[rank]:
                continue
            self._is_out[rank] = is_out
            if rank == self._rank_info.rank:
                self._recorder.event("straggler", slot=slot, change="left out" if is_out else "back")
            self._lines[rank] += is_out
            if self._lines[rank] <= MOST_LINES:
                lines.append(describe_straggler(slot, f"rank {rank} ({self._rank_info.devices[rank]})", is_out))
        return lines


def describe_straggler(slot: int, name: str, is_out: bool) -> str:
    if is_out:
        return (
            f"  {name} became too slow to help and is left out from step {slot} on; it is tried again now and then "
            "(too hot, or another program?)"
        )
    return f"  {name} is fast enough again and takes part from step {slot} on"
