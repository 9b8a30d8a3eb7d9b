"""What a rank has trained and not handed in yet, and what its rounds cost it; kept by LocalSGD.

A round that is entered takes along weight, times and losses. Only when it was committed they are gone for good; a round
that came to nothing because a rank was lost gives them back, and the next one carries them
(train/elastic/settle_local.py).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from uneven.average.background import RoundResult
from uneven.comm.gather import gather_json
from uneven.policy.lineage import Lineage
from uneven.policy.recorded import Round
from uneven.policy.round_report import RoundReport
from uneven.timeline.record import Recorder
from uneven.train.engine import Engine


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
        self.lineage.rounds += 1

    def put_back(self) -> None:
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
