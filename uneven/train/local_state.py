"""What ranks of a local policy agree upon beside params and buffers, and what each has not handed in yet.

A window may span several epochs. The losses inside it are known only as one sum, so these epochs share their mean,
and `first` and `until` say over which slots it was taken. The events that a round leads to are a list: one that a lost
rank interrupts is still in it, and is redone from its start. Where ranks are lost, the furthest one tells the
others all of it as a LocalState (train/settle.py), and LocalSGD goes on from that in the next group.

A round that is entered takes along weight, times and losses of a rank (RoundTally). Only when it was committed they are
gone for good; a round that came to nothing because a rank was lost gives them back, and the next one carries them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from uneven.average.background import RoundResult
from uneven.comm.gather import gather_json
from uneven.policy.lineage import Era, Lineage, decode
from uneven.policy.recorded import RecordedWindows, Round
from uneven.policy.round_report import RoundReport
from uneven.policy.windows import Windows
from uneven.step.finite import Cause, Fault
from uneven.timeline.record import Recorder
from uneven.train.engine import Engine
from uneven.train.policies import LocalScale
from uneven.train.state import BadStep, DroppedSteps, describe_drop, too_many
from uneven.train.synchronizer import EventCall, RankStatus


class EpochEnds:
    """Life cycle: `learn` and `note` with every round that is merged. The same on all ranks."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.is_silent = False  # nothing is reached: a benchmark trains in segments
        self.epoch = 0  # epochs that all ranks have passed
        self.samples = 0  # of the epoch in progress, trained by all ranks
        self.losses = [0.0, 0.0]  # sum and count over all ranks since the last epoch end
        self.pending: list[EventCall] = []

    def begin(self) -> None:
        """As many epochs are over as the axis says."""
        self.epoch = self.engine.axis.epochs_before(self.engine.state.trained)

    def be_silent(self) -> None:
        """No event is due any more: a benchmark trains in segments."""
        self.is_silent = True

    def take(self, agreed: "LocalState") -> None:
        """Go on from what ranks have agreed upon."""
        self.epoch = agreed.epoch
        self.samples = agreed.epoch_samples
        self.losses = list(agreed.losses)
        self.pending = list(agreed.pending)

    def end_alone(self, passed: int) -> tuple[float, float]:
        """This rank is the only one left, and needs no round for what is due since the event at slot `passed`.

        Returns the losses since the last epoch end that is over then: sum and count.
        """
        axis, events = self.engine.axis, self.engine.events
        position = self.engine.state.trained
        stop = max(self.epoch, axis.epochs_before(position))
        is_event = events.evaluates(position) or events.saves(position)
        is_inside = is_event and position > max(passed, axis.epoch_end(stop - 1))
        own = self.engine.meter.pop_async()()
        self.losses = [self.losses[0] + own[0], self.losses[1] + own[1]]
        if stop > self.epoch or is_inside:
            until = position if is_inside else axis.epoch_end(stop - 1)
            self.pending += self.calls(self.epoch, stop, until, is_inside=is_inside)
            self.epoch = stop
        return self.losses[0], self.losses[1]

    def state_dict(self) -> dict[str, Any]:
        """As JSON; `epoch` and `pending` only count within a run."""
        return {"losses": self.losses, "epoch_samples": self.samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.losses, self.samples = list(state["losses"]), state["epoch_samples"]

    def learn(self, rows: Sequence[RoundReport]) -> None:
        self.samples += int(sum(row.samples for row in rows))

    def passed(self, rows: Sequence[RoundReport]) -> int:
        """How many epochs all ranks have passed with this round."""
        return max(self.epoch, self.engine.axis.epochs_before(int(min(row.next_slot for row in rows))))

    def note(self, rows: Sequence[RoundReport], event: int | None) -> None:
        """Add the round's losses; list the calls for every epoch that ends with it, and for an event at slot `event`.

        A checkpoint may be taken at the event: everything else that belongs to the round is up to date before that.
        """
        self.losses[0] += sum(row.loss_sum for row in rows)
        self.losses[1] += sum(row.loss_count for row in rows)
        axis, first = self.engine.axis, self.epoch
        stop = self.passed(rows)
        until = axis.epoch_end(stop - 1) if event is None else event
        is_inside = until > axis.epoch_end(stop - 1)  # an event inside the next epoch
        if stop > first:
            self.epoch, self.samples = stop, 0
        if stop == first and not is_inside:
            return
        # All may have got to an event with the round before it; held back by the event, they agree already.
        self.engine.state.reach_slot(max(self.engine.state.trained, until))
        self.pending += self.calls(first, stop, until, is_inside=is_inside)

    def calls(self, first: int, stop: int, until: int, *, is_inside: bool) -> list[EventCall]:
        """The ends of these epochs and an event inside the next one, with the mean loss, which begins anew."""
        loss_sum, count = self.losses
        if stop > first or self.engine.events.has_entry(until):  # a checkpoint alone has no entry
            self.losses = [0.0, 0.0]
        loss = loss_sum / count if count else float("nan")
        ended = [EventCall(epoch, loss, first, until) for epoch in range(first, stop)]
        return [*ended, EventCall(stop, loss, first, until, until)] if is_inside else ended

    @property
    def due(self) -> EventCall | None:
        """The first call that is pending: it stays so until all ranks have been through it."""
        if self.is_silent:
            self.pending.clear()
        return self.pending[0] if self.pending else None


@dataclass(frozen=True)
class LocalState:
    """After the last round of the lineage. Everything in it is plain JSON."""

    eras: list[Era]
    members: tuple[str, ...]  # that `windows` is of, in rank order
    windows: dict[str, Any] | None  # Windows.state_dict
    passed: int  # the last event that all ranks have passed
    lr_scale: tuple[float, bool]
    epoch: int
    epoch_samples: int
    losses: list[float]
    pending: list[EventCall]
    is_stopping: bool
    # Of this settlement:
    ledger: dict[str, Any] = field(default_factory=dict)
    lost: list[dict[str, Any]] = field(default_factory=list)  # the logs of members that are gone, as far as they count
    again: list[int] = field(default_factory=list)  # slots that they may have trained, and that are trained again

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> "LocalState":
        read = dict(entry)
        read["eras"] = [Era(generation, rounds, tuple(members)) for generation, rounds, members in read["eras"]]
        read["pending"] = [EventCall._make(call) for call in read["pending"]]
        for name in ("members", "lr_scale"):
            read[name] = tuple(read[name])
        return cls(**read)

    @property
    def lost_logs(self) -> list[dict[str, Any]]:
        """As RunState.lost_logs keeps them."""
        return [{**log, "log": decode(log["log"]), "dropped": decode(log["dropped"])} for log in self.lost]

    def start(
        self, windows: Windows | RecordedWindows, scale: LocalScale, members: tuple[str, ...], position: int
    ) -> None:
        """Windows that were just made for these members go on from here, where so many slots are trained."""
        assert isinstance(windows, Windows), "nobody is lost in a replay"
        assert self.windows is not None, "of a run that is no replay"
        windows.go_on(self.windows, self.places(members))
        windows.resume_at(position, self.passed)
        scale.restore(*self.lr_scale)

    def places(self, members: tuple[str, ...]) -> list[int | None]:
        """Where each of these members was among those that `windows` is of."""
        return [self.members.index(member) if member in self.members else None for member in members]


@dataclass(frozen=True)
class Entered:
    """What the round in flight carries of this rank."""

    samples: int
    dropped: int
    busy_ms: float
    user_ns: int
    parts: int  # of this rank's log, when it entered
    bad_parts: int  # of its list of steps that were not finite
    losses: Callable[[], tuple[float, float]]  # sum and count; waits for the device

    @property
    def weight(self) -> float:
        return float(self.samples - self.dropped)

    def with_losses(self, row: RoundReport) -> RoundReport:
        loss_sum, loss_count = self.losses()
        return row._replace(loss_sum=loss_sum, loss_count=loss_count)


class RoundTally:
    """`samples`, of which `dropped` were not finite: the rest is this rank's weight in the next average.

    Invariant: the first `parts` of this rank's log are in averages of the lineage, and none of the others is.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.samples = self.dropped = 0
        self.busy_ms = 0.0
        self.user_ns = 0  # code of the user's own
        self.parts, self.bad_parts = len(engine.state.log), len(engine.state.dropped.parts)
        self.entered: Entered | None = None
        self.lineage = Lineage()
        self._enqueued = 0  # steps that the device had still to run when the last round was entered

    def start(self) -> None:
        """Before the first round of a run: every rank's log so far is in the store, and all know who trains."""
        engine, info = self._engine, self._engine.rank_info
        if info.records is None:
            return
        info.records.write(info.generation, 0, engine.state.log, engine.state.dropped.parts, engine.state.rounds[-1])
        members = gather_json(info.group, info.member)
        self.lineage = Lineage(generation=info.generation, members=tuple(members))

    def add(self, samples: int, busy_ms: float) -> None:
        """This rank has worked for so long, on so many samples."""
        self.samples += samples
        self.busy_ms += busy_ms

    def drop(self, bad_steps: Sequence[BadStep]) -> None:
        """These were not finite after all."""
        self.dropped += sum(part.samples for part, _ in bad_steps)

    def note_user_time(self, ns: int) -> None:
        """Code of the user's own ran for so long."""
        self.user_ns += ns

    def go_on_in(self, lineage: Lineage) -> None:
        """Ranks were lost or joined, and all rounds that count are these. The round in flight came to nothing."""
        self._put_back()
        self.lineage = lineage

    def enter(self) -> Entered:
        """A round takes along all that this rank has trained; the meter begins anew."""
        assert self.entered is None, "one round in flight"
        engine = self._engine
        parts = len(engine.state.log)
        bad_parts = len(engine.state.dropped.parts)
        losses = engine.meter.pop_async()
        busy_ms = self.busy_ms * self._enqueued_over_done()
        self.entered = Entered(self.samples, self.dropped, busy_ms, self.user_ns, parts, bad_parts, losses)
        self.samples = 0
        self.dropped = 0
        self.busy_ms = 0.0
        self.user_ns = 0
        return self.entered

    def writer(self, due: int, lr_scale: float) -> Callable[[], None]:
        """Writes down what the round that was entered carries, where somebody would read it."""
        engine = self._engine
        records = self._engine.rank_info.records
        entered = self.entered
        if records is None:
            return lambda: None
        assert entered is not None, "a round was entered"
        parts, dropped = engine.state.log[self.parts : entered.parts], engine.state.dropped.parts[self.bad_parts :]
        about = Round(due, entered.parts, engine.state.rounds[-1].merged, lr_scale)
        generation = self.lineage.generation
        number = self.lineage.rounds + 1
        last = engine.state.rounds[-1]
        return lambda: records.write(generation, number, parts, dropped, about, last)

    def commit(self) -> None:
        """The round in flight counts."""
        assert self.entered is not None, "a round was entered"
        self.parts, self.bad_parts = self.entered.parts, self.entered.bad_parts
        self.entered = None
        self.lineage.count_round()

    def _put_back(self) -> None:
        """The round in flight, if there is one, came to nothing: the next one carries what was in it."""
        entered, self.entered = self.entered, None
        if entered is None:
            return
        self.samples += entered.samples
        self.dropped += entered.dropped
        self.busy_ms += entered.busy_ms
        self.user_ns += entered.user_ns
        totals = self._engine.meter.totals
        totals.add_(torch.tensor(entered.losses(), dtype=torch.float64, device=totals.device))

    def _enqueued_over_done(self) -> float:
        """Steps enqueued over steps done since the last round: busy_ms covers only what the device has done."""
        before, self._enqueued = self._enqueued, self._engine.run_ahead.behind
        enqueued = self.samples / self._engine.axis.slot_size
        done = enqueued + before - self._enqueued
        return enqueued / done if done > 0 else 1.0


class RoundCosts:
    """`entered` when the rank has sent its snapshot, `received` when it has merged the average."""

    def __init__(self, recorder: Recorder, is_async: bool) -> None:
        self._recorder, self._is_async = recorder, is_async
        self.report = RoundReport()  # the fields of the last round
        self.entered_ns = 0
        self.transfer_ms = self._wait_ms = self._entering_ms = 0.0
        self.delay = 0.0  # of the last merge, in steps of the slowest rank
        self._trip_ns = (0, 0, 0)  # last round: snapshot taken, all ranks entered, average back
        self._sent_bytes = (0, 0)  # sent for rounds: before the last one, and including it

    def entered(self, began_ns: int) -> None:
        self.entered_ns = began_ns
        self._entering_ms = (self._recorder.enter("other") - began_ns) / 1e6

    def record_wait(self, began_ns: int, joined_ns: int, user_ms: float) -> None:
        """Until all ranks had entered the round this was waiting; then transfer, then the merge.

        As far as another rank was held up by code of the user's own, the waiting is the user's time, too.
        """
        if user_ms:
            self._recorder.enter("user", began_ns)
            self._recorder.enter("wait", min(joined_ns, began_ns + int(user_ms * 1e6)))
        self._recorder.enter("communication", joined_ns)

    def received(
        self, arrived: RoundResult, began_ns: int, here_ns: int, user_ms: float, slowest: float, payload_bytes: int
    ) -> None:
        """Waiting began at `began_ns`, the average was there at `here_ns` and is merged now.

        `slowest`: slots per ms of the slowest rank; `payload_bytes`: sent by this rank for rounds, in all.
        """
        own_ms = self._entering_ms + (self._recorder.enter("other") - here_ns) / 1e6
        self._wait_ms = ((here_ns - began_ns) if self._is_async else (arrived.joined_ns - arrived.snapshot_ns)) / 1e6
        self.transfer_ms = own_ms + (0.0 if self._is_async else (arrived.done_ns - arrived.joined_ns) / 1e6)
        self.report = RoundReport(
            transfer_ms=own_ms,
            latency_ms=max(0.0, (arrived.done_ns - arrived.snapshot_ns) / 1e6 - user_ms),
            divergence=arrived.divergence,
        )
        self.delay = (here_ns - arrived.snapshot_ns) / 1e6 * slowest
        self._trip_ns = (arrived.snapshot_ns, arrived.joined_ns, arrived.done_ns)
        self._sent_bytes = (self._sent_bytes[1], payload_bytes)

    def fields(self) -> dict[str, float]:
        """Of the timeline's event; times in ms before now, because ranks' clocks are aligned only afterwards."""
        now_ns = self._recorder.clock()
        left, met, back = ((now_ns - ns) / 1e6 for ns in self._trip_ns)
        before, after = self._sent_bytes
        return {
            "delay": self.delay,
            "wait_ms": self._wait_ms,
            "transfer_ms": self.transfer_ms,
            "latency_ms": self.report.latency_ms,
            "divergence": self.report.divergence,
            "left_ms_ago": left,
            "met_ms_ago": met,
            "back_ms_ago": back,
            "bytes": after - before,
        }


def note_dropped(dropped: DroppedSteps, rows: Sequence[RoundReport], slot_size: int) -> list[str]:
    """Count what ranks of a local policy have dropped since their last round; returns lines to print, by rank 0."""
    lines = []
    for rank, row in enumerate(rows):
        if row.dropped:
            dropped.count(int(row.dropped))
            slot = f"{int(row.bad_slot)}" + ("" if row.dropped <= slot_size else " and others before it")
            lines.append(describe_drop(slot, int(row.dropped), _last_fault(rank, row)))
    return lines


def check_bad_steps(rows: Sequence[RoundReport], max_bad_steps: int) -> None:
    """NotFiniteError, on all ranks alike, where one of a local policy has had too many bad steps in a row."""
    for rank, row in enumerate(rows):
        if row.status == RankStatus.NOT_FINITE:
            raise too_many(int(row.bad_slot), _last_fault(rank, row), max_bad_steps)


def _last_fault(rank: int, row: RoundReport) -> Fault:
    return Fault(rank, Cause(int(row.bad_cause)))
