"""The contract between the worker's loop and how ranks stay in step: GradientSync (exact) or LocalSGD (rounds).

And what ranks tell each other in every exchange beside gradients or params: each one's status, what is asked of it, and
numbers that show whether they still agree.

A rank that leaves its own loop early reports so in one last collective that carries no gradients. Every rank that
reads it raises, so no rank waits for one that will not come (tests/api/test_loop.py).

What is asked of a rank is to stop, to leave, or a checkpoint or an evaluation that no slot of the axis asks for: by a
signal, the command line, a callback or an interval of time. A rank reads it with every exchange, as a value (Inbox).
Rank 0's clock decides on intervals of time. The wish travels with the next gradient sum or round, and all ranks meet at
the slot that follows from it, so no rank's clock has to agree with another's. All ranks note when they met: whoever is
rank 0 after a loss goes on with the interval.

[Note: code per batch] In a slot a rank may have no samples: it gets no batch then, runs none of the user's code for it,
and still takes part in the step. So what a script does per batch beside its loss (a scheduler of its own, a clamp of
weights, a second optimizer step) happens less often on some ranks, and they drift apart. Devices round differently, but
apply the same sum of gradients, so that drift does not grow: a difference far beyond rounding is none of theirs.
GradientSync compares params and rates wherever ranks are made equal: before an evaluation, a checkpoint and the end.

Both synchronizers tell the user of a device that became too slow to help (Stragglers): when it is left out, and when it
is back. The policies decide (policy/exact.py, policy/windows.py), on all ranks alike; the lines are printed once, and
the timeline has an event for each in the device's own lane.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum, IntFlag
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from uneven.average.buffers import BufferAverage
from uneven.comm.clock import Clock
from uneven.comm.collectives import broadcast_params
from uneven.comm.gather import gather_rows
from uneven.comm.group import Group
from uneven.config import Every, RunConfig, read_every
from uneven.data.feed import Micros
from uneven.errors import InputError, LeftLoopError, RankError
from uneven.parallel.batchnorm import synced_buffers
from uneven.policy.axis import Part
from uneven.policy.events import Events
from uneven.policy.finish import Cost
from uneven.policy.ledger import Ledger
from uneven.policy.recorded import RecordedWindows
from uneven.policy.round_report import RoundReport
from uneven.policy.slot_schedule import first_free_slot
from uneven.policy.windows import Windows
from uneven.step.schedule import RATE, read_setting
from uneven.timeline.record import Recorder
from uneven.train.callbacks import CallbackRunner
from uneven.train.rank_info import Membership, RankInfo
from uneven.train.requests import Requests


class RankStatus(IntEnum):
    """A small number, because it travels in the same tensor as the other statistics."""

    TRAINING = 0  # the rank goes on
    STOP_REQUESTED = 1  # Ctrl-C or a stop request reached this rank; all ranks stop after the same slot
    LEFT_EPOCH = 2  # the user's loop was left in the middle of an epoch
    FINISHED = 3  # the user's loop called finish()
    NOT_FINITE = 4  # the rank has had max_bad_steps bad steps in a row (local policies)
    SKIPS_REST = 5  # the user's loop leaves out the rest of the epoch: all ranks do


class Wish(IntFlag):
    """What a rank wants at the next slot where all ranks can meet: it travels in the sum that ranks exchange anyway."""

    NONE = 0
    SAVE = 1  # an interval of time is over, or the user asked for a checkpoint
    EVALUATE = 2
    LEAVE = 4  # the rank leaves the run; what it has trained is in this very exchange (train/settler.py)


def wished(values: Iterable[float]) -> Wish:
    """What any rank wants, of the numbers that arrived."""
    found = 0
    for value in values:
        found |= int(value)
    return Wish(found) if found else Wish.NONE


class Asked(NamedTuple):
    """What is asked of a rank at a moment."""

    is_stopping: bool  # to end the run
    wish: Wish


class Inbox:
    """Life cycle: `start` with training, `read` in every exchange of the ranks, `saved` and `evaluated` afterwards."""

    def __init__(
        self,
        config: RunConfig,
        evaluation: Every | None,
        requests: Requests,
        callbacks: CallbackRunner,
        rank_info: RankInfo,
        clock: Clock,
    ) -> None:
        self.requests = requests
        self._callbacks = callbacks
        self._membership: Membership | None = None  # where this rank may be asked to leave
        self._rank_info = rank_info  # asked each time: another rank becomes rank 0 where that one is lost or leaves
        self._save_ns = _interval_ns(read_every(config.save_every))
        self._eval_ns = _interval_ns(evaluation)
        self._is_replay = config.replay is not None  # it follows its log alone
        self._clock = clock
        self._has_started = False
        self._saved_ns = 0
        self._evaluated_ns = 0

    def may_leave(self, membership: Membership) -> None:
        """From now on this rank may be asked to leave the run."""
        self._membership = membership

    def start(self) -> None:
        """Training begins: intervals count from here, also where training goes on with other ranks later. Else an
        interval longer than a generation of ranks would never end.
        """
        if not self._has_started:
            self._has_started = True
            self._saved_ns = self._evaluated_ns = self._clock()

    def read(self) -> Asked:
        is_stopping = self.requests.stop.is_set() or (self._callbacks.is_any and self._callbacks.is_stopping())
        return Asked(is_stopping, self._wish())

    def _wish(self) -> Wish:
        if self._is_replay:
            return Wish.NONE
        wish = Wish.SAVE if self.requests.save.is_set() else Wish.NONE
        if self._membership is not None and self._membership.is_leaving():
            wish |= Wish.LEAVE
        if self._rank_info.rank != 0 or (self._save_ns is None and self._eval_ns is None):
            return wish
        now_ns = self._clock()
        if self._save_ns is not None and now_ns - self._saved_ns >= self._save_ns:
            wish |= Wish.SAVE
        if self._eval_ns is not None and now_ns - self._evaluated_ns >= self._eval_ns:
            wish |= Wish.EVALUATE
        return wish

    def saved(self) -> None:
        self._saved_ns = self._clock()
        self.requests.save.clear()

    def evaluated(self) -> None:
        self._evaluated_ns = self._clock()


def request_event(events: Events, slot: int, wish: Wish, passed: int) -> bool:
    """Make this slot an event, unless another one that is still to come was requested; returns whether it is one now.

    On all ranks alike, before any of them has passed it. `passed`: the last event.
    """
    saves = bool(wish & Wish.SAVE) and not any(known > passed for known in events.extra_saves)
    evaluates = bool(wish & Wish.EVALUATE) and not any(known > passed for known in events.extra_evaluations)
    if saves:
        events.request_save(slot)
    if evaluates:
        events.request_evaluation(slot)
    return saves or evaluates


def follow_wish(events: Events, windows: Windows | RecordedWindows, rows: Sequence[RoundReport]) -> Wish:
    """Where a rank wants to save or evaluate, make the first slot at which all ranks can still meet an event.

    Returns what any rank wants. Call it on all ranks before `windows` notes the round. A wish is repeated until that
    slot is reached.
    """
    wish = wished(row.wish for row in rows)
    if wish and isinstance(windows, Windows):
        slot = first_free_slot(rows, windows.event)
        if request_event(events, slot, wish, windows.last_event):
            windows.learn_event(slot)
    return wish


def _interval_ns(every: Every | None) -> int | None:
    return int(every.number * 1e9) if every is not None and every.unit == "seconds" else None


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
        """From now on keep what is needed to go on when a rank is lost (train/settle.py)."""
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


def check_status(statuses: Sequence[RankStatus], slot: int) -> None:
    """LeftLoopError naming the first rank that left before this slot."""
    if not any(statuses):
        return
    for rank, status in enumerate(statuses):
        if status == RankStatus.LEFT_EPOCH:
            raise LeftLoopError(
                f"rank {rank} left its epoch at slot {slot}: every rank must train every batch that "
                "ddp.batches(epoch) yields, by one ddp.step(loss) each"
            )
        if status == RankStatus.FINISHED:
            raise LeftLoopError(f"rank {rank} called ddp.finish() before slot {slot} while other ranks still train")


def check_agreement(fingerprints: Sequence[int], when: str) -> None:
    """RankError naming a rank whose replicated state (policy, params) is not the same as rank 0's."""
    for rank, fingerprint in enumerate(fingerprints):
        if fingerprint != fingerprints[0]:
            raise RankError(f"rank {rank} differs from rank 0 {when}: {list(fingerprints)}")


TOLERANCE = 1e-4  # of a param's size; fp32 rounds by 6e-8 a step, in either direction
ROUNDINGS = 8  # that a type with fewer digits may be apart, in its own precision
ADVICE = (
    "a rank without samples in a step has no batch, so what a script does for every batch beside its loss does not "
    "happen there: give the scheduler to Ddp.setup or fit, change weights in a callback's on_step, which runs on every "
    "rank, and step the optimizer by ddp.step alone; an optimizer that draws random numbers draws others on each rank"
)


def check_replicas(group: Group, model: nn.Module, optimizer: Optimizer, *, has_own_rates: bool = True) -> None:
    """InputError on every rank where one differs from rank 0; a collective.

    Without `has_own_rates` this rank's are not compared: a schedule sets them before every step, and ranks may have
    begun another number of steps than they have taken.
    """
    named = [
        (name, p) for name, p in model.named_parameters() if p.numel() and (p.is_floating_point() or p.is_complex())
    ]
    rates = [rate if has_own_rates else math.nan for rate in read_setting(optimizer, RATE)]
    params = [param.detach() for _, param in named]
    rows = gather_rows(group, [*rates, *_sizes(params)])
    for rank, row in enumerate(rows):
        for first, own in zip(rows[0][: len(rates)], row[: len(rates)], strict=True):
            if math.isfinite(first + own) and not math.isclose(first, own, rel_tol=1e-9):
                raise InputError(f"rank {rank} has the learning rate {own:.6g}, rank 0 has {first:.6g}: {ADVICE}")
        if (place := _difference(rows[0][len(rates) :], row[len(rates) :], params)) is not None:
            raise InputError(f"rank {rank} has other values in {named[place][0]} than rank 0: {ADVICE}")


def take_first(group: Group, model: nn.Module) -> None:
    """Rank 0's params on every rank, and its buffers that are not averaged; a collective.

    A GPU and a CPU, or two kinds of GPU, round differently: one model is evaluated and saved.
    """
    equal = synced_buffers(model)
    buffers = (buffer for name, buffer in model.named_buffers() if name in equal)
    broadcast_params(group, (*model.parameters(), *buffers))


@torch.no_grad()
def _sizes(params: Sequence[Tensor]) -> list[float]:
    """The sums of all params, then of their absolute values; one copy to the host."""
    if not params:
        return []
    real = [torch.view_as_real(param) if param.is_complex() else param for param in params]
    device = real[0].device
    sums = [param.sum(dtype=torch.float64).to(device) for param in real]
    sizes = [param.abs().sum(dtype=torch.float64).to(device) for param in real]
    found: list[float] = torch.stack([*sums, *sizes]).tolist()
    return found


def _difference(first: Sequence[float], own: Sequence[float], params: Sequence[Tensor]) -> int | None:
    """The first param whose sums differ by more than rounding."""
    count = len(params)
    sizes = first[count:]
    # A param that swings around zero has roundings of where it has been, so the typical size of the model counts, too.
    typical = sum(sizes) / max(1, sum(param.numel() for param in params))
    for place, param in enumerate(params):
        precise = max(TOLERANCE, ROUNDINGS * torch.finfo(param.dtype).eps)
        allowed = precise * (sizes[place] + typical * param.numel())
        for mine, theirs in ((first[place], own[place]), (first[count + place], own[count + place])):
            if math.isfinite(mine) and not abs(mine - theirs) <= allowed:
                return place
    return None
