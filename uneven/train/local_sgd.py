"""The local pace: a rank steps by itself and averages its params with the others' in rounds along the axis.

At every batch boundary it asks: has the average of the round in flight come back, and is the next round due? Cadence
waits for the average; async goes on training and merges at the first boundary after it has arrived, losing nothing.
Everything ranks do together lies on the axis and is passed in its order: nothing else is ever agreed upon.
"""

from collections.abc import Callable, Iterator, Sequence

from uneven.average.background import Arrived, BackgroundAverage
from uneven.average.buffers import BufferAverage
from uneven.average.replica import Replica
from uneven.average.transport import make_transport
from uneven.comm.gather import gather_checksums
from uneven.comm.group import Group
from uneven.data.feed import Micros
from uneven.errors import RankError
from uneven.policy.axis import Part
from uneven.policy.finish import Cost
from uneven.policy.recorded import RecordedSchedule, RecordedWindows, Round
from uneven.policy.scale import CHANGE
from uneven.policy.slot_schedule import SlotSchedule
from uneven.policy.subset import advice, forecast_local
from uneven.policy.windows import RoundReport, Windows
from uneven.step.costs import measure_sum_ms
from uneven.train.engine import Engine
from uneven.train.events import local_sgd_config, make_slot_schedule
from uneven.train.status import STOP, check_agreement, check_status


class LocalSGD:
    """Invariant: a rank has at most one round in flight, and merges round k before it enters round k + 1."""

    def __init__(
        self,
        engine: Engine,
        group: Group,
        is_stopping: Callable[[], bool],
        end_epoch: Callable[[int, float], None],
    ) -> None:
        self.engine, self.group = engine, group
        self._is_stopping, self.end_epoch = is_stopping, end_epoch
        self.notes: list[str] = []
        self.epoch = 0  # epochs that all ranks have passed
        self.buffers = BufferAverage(engine.model)
        self._is_stopped = False
        self._hears_stop = False
        self._costs = RoundReport()  # what this rank's last round cost
        self._samples = 0  # trained since this rank last entered a round: its weight
        self._busy_ms = 0.0
        self._behind = 0  # steps that the device had still to do when the last round was entered
        self._free_ns = 0  # since when the rank's time is its own work
        self._entering_ms = self._wait_ms = self.transfer_ms = 0.0
        self._losses = [0.0, 0.0]  # sum and count of all ranks since the last epoch that ended
        self._broken: list[int] = []  # ranks whose params were not finite in the last round
        self._is_scaled = False
        self._delay = 0.0  # of the last merge, in steps of the slowest rank
        self._trip_ns = (0, 0, 0)  # when the last round left, met the others' and came back
        self._wire_bytes = [0, 0]  # put on the wire for rounds: before the last one, and with it

    def meet(self, costs: Sequence[Cost]) -> None:
        """Round 0: everyone knows everyone's cost; the first window and the learning rate follow from them."""
        engine, config = self.engine, self.engine.config
        with_state = config.optimizer_state == "average"
        replica = Replica(engine.model, engine.optimizer, with_state)
        road = make_transport(replica, is_nccl=config.backend == "nccl")
        self.average = BackgroundAverage(replica, road, self.buffers, self.group.new_group(), config.verify)
        self.windows: Windows | RecordedWindows
        self.slot_schedule: SlotSchedule | RecordedSchedule
        self.windows, self.slot_schedule = make_slot_schedule(engine, self._claim, costs)
        self.scale = 1.0
        self._set_scale()
        engine.rounds.append(Round(0, 0, 0, self.scale))
        is_measured = engine.is_rehearsed and not config.has_fixed_shares
        slot_ms = [cost.time_ms(engine.axis.slot_size) for cost in costs]
        alone = [1e3 * engine.axis.slot_size / ms for ms in slot_ms]
        counts = list(self.windows.counts)
        engine.recorder.event("shares", slot=0, shares=counts, alone=alone if is_measured else [])
        if is_measured:
            round_ms, terms = measure_sum_ms(self.group, engine.model), local_sgd_config(config)
            found = forecast_local(costs, engine.axis.slot_size, round_ms, terms.max_anchor, terms.overhead_target)
            self.notes += advice(found, [str(device) for device in engine.rank_info.devices])

    def reset_timer(self) -> None:
        """From now on the rank's time is its own work again: called after anything that is not a step."""
        self._free_ns = self.engine.recorder.enter("data")

    def parts(self) -> Iterator[Part]:
        axis, batch = self.engine.axis, self.engine.config.batch_size
        last = 0
        while not self._is_ended:
            index = self.slot_schedule.hand()
            if index is None:  # a round comes first: an empty part brings the rank to its boundary
                slot = axis.slot(last)
                yield Part(slot, slot.first, 0, batch)
                continue
            slot = axis.slot(index)
            last = index
            yield Part(slot, slot.first, slot.samples, batch)

    def train(self, part: Part, micros: Micros) -> bool:
        """One slot, if there is one, and the rounds due after it; returns whether the run is to stop."""
        if part.samples:
            self._step(part, micros)
            self.slot_schedule.trained()
        while not self._is_ended:
            if self.slot_schedule.in_flight:
                if not self._may_merge():
                    break
                self._merge()
            elif self._stops or self.slot_schedule.is_due():
                self._enter(STOP if self._stops else 0.0)
            else:
                break
        self._free_ns = self.engine.recorder.enter("data")
        if self._is_stopped:
            self.engine.recorder.event("stop", slot=self.engine.trained)
        return self._is_stopped

    def say(self, word: float) -> list[float]:
        """A round at once, for the word that rides in it; returns everybody's."""
        if self.slot_schedule.in_flight:
            self._receive()
        self._enter(word)
        return [row.status for row in self._receive()]

    def average_buffers(self) -> None:
        """Called where all ranks meet: float buffers were averaged in the round, the integer ones are now."""
        self.buffers.take_maximum(self.group)

    def ratio(self) -> tuple[int, ...]:
        return self.windows.counts

    def show(self) -> dict[str, float]:
        return {
            "round": self.windows.rounds,
            "staleness": self.slot_schedule.staleness if self.slot_schedule.in_flight else 0,
            "anchor": self.windows.anchor,
            "delay": self._delay,
        }

    def finalize(self) -> None:
        """After the last round: all replicas are equal."""
        self.engine.recorder.enter("communication")
        self.engine.run_ahead.drain()
        self.average_buffers()
        self.average.close()
        if self.engine.config.verify:
            tensors = [*self.engine.model.parameters(), *self.engine.model.buffers()]
            check_agreement(gather_checksums(self.group, tensors), "in its params or buffers at the end")

    def close(self) -> None:
        self.average.close()

    @property
    def _is_ended(self) -> bool:
        return self._is_stopped or self.slot_schedule.is_over

    @property
    def _stops(self) -> bool:
        """Asked to stop, or told by another rank: then rounds follow at once until all ranks say so."""
        return self._hears_stop or self._is_stopping()

    def _may_merge(self) -> bool:
        return self._stops or self.windows.is_blocking or self.slot_schedule.may_merge(self.average.is_done())

    def _step(self, part: Part, micros: Micros) -> None:
        engine = self.engine
        micros = engine.open(micros)
        began_ns = engine.recorder.enter("compute")
        engine.move_rates(part.slot.index, self.scale)
        engine.step_alone(part, micros, self._free_ns)
        engine.after_step(began_ns)
        now_ns = engine.recorder.enter("other")
        engine.note(part)
        self._samples += part.samples
        self._busy_ms += (now_ns - self._free_ns) / 1e6

    def _enter(self, word: float) -> None:
        """Enter the next round: the snapshot leaves, with a row of what the others should know."""
        engine, recorder = self.engine, self.engine.recorder
        asked_ns = recorder.enter("compute")
        if word or self.windows.is_blocking:
            engine.run_ahead.drain()  # what the device has still to do is the rank's own work
        began_ns = recorder.enter("communication")
        self._busy_ms += (began_ns - asked_ns) / 1e6
        losses = engine.meter.leave()
        known = self._costs._replace(
            next_slot=float(self.slot_schedule.next_slot),
            samples=float(self._samples),
            busy_ms=self._busy_ms * self._ahead(),
            status=word,
            fingerprint=float(self.windows.fingerprint()),
        )
        self.average.start(float(self._samples), lambda: _with_losses(known, losses()))
        self.slot_schedule.enter()
        self._samples, self._busy_ms = 0, 0.0
        self.entered_ns, self._entered = began_ns, self.slot_schedule.parts
        self._entering_ms = (recorder.enter("other") - began_ns) / 1e6

    def _ahead(self) -> float:
        """Steps enqueued over steps done since the last round: a device's time is known only for what it has done."""
        before, self._behind = self._behind, self.engine.run_ahead.behind
        enqueued = self._samples / self.engine.axis.slot_size
        done = enqueued + before - self._behind
        return enqueued / done if done > 0 else 1.0

    def _receive(self) -> list[RoundReport]:
        """Wait for the average where it is not here yet, and merge it; everybody's rows."""
        recorder = self.engine.recorder
        began_ns = recorder.enter("wait")
        self.average.wait()
        here_ns = recorder.clock()
        arrived = self.average.finish(is_unchanged=self.slot_schedule.staleness == 0)
        # Up to the moment when all had come it was waiting; from then on it was the wire, then the merge.
        recorder.enter("communication", min(here_ns, max(began_ns, arrived.met_ns)))
        now_ns = recorder.enter("other")
        self._note_costs(arrived, began_ns, here_ns, now_ns)
        rows = [RoundReport(*one) for one in arrived.rows]
        self._note_broken(arrived.broken, rows)
        return rows

    def _merge(self) -> None:
        due, event, anchor = self.windows.due, self.windows.event, self.windows.anchor
        rows = self._receive()
        where = f"in the round at slot {due}"
        check_status([row.status for row in rows], due)
        check_agreement([int(row.fingerprint) for row in rows], where)
        decisions = self.windows.note(rows)
        staleness = self.slot_schedule.staleness
        self.slot_schedule.merged()
        recorder = self.engine.recorder
        recorder.event(
            "round",
            round=self.windows.rounds,
            due=due,
            steps_late=staleness,
            delay=self._delay,
            wait_ms=self._wait_ms,
            transfer_ms=self.transfer_ms,
            latency_ms=self._costs.latency_ms,
            divergence=self._costs.divergence,
            samples=[int(row.samples) for row in rows],
            **self._trip(),
        )
        for decision in decisions:
            recorder.event(decision.kind, slot=due, **decision.fields)
            if decision.kind == "guard":
                self._say_guard(decision.fields, anchor)
        self._hears_stop = self._hears_stop or any(row.status == STOP for row in rows)
        self._is_stopped = all(row.status == STOP for row in rows)
        if not self._is_scaled:
            self._set_scale()
        if self.windows.is_over or self.windows.event != event:
            self.engine.trained = due
        self._pass_epochs(rows)
        self.engine.rounds.append(Round(due, self._entered, self.slot_schedule.parts, self.scale))

    def _pass_epochs(self, rows: Sequence[RoundReport]) -> None:
        """Tell of the epochs that every rank is past, with the losses that came in until now."""
        self._losses[0] += sum(row.loss_sum for row in rows)
        self._losses[1] += sum(row.loss_count for row in rows)
        axis, (loss_sum, count) = self.engine.axis, self._losses
        while self.epoch < axis.epochs and min(row.next_slot for row in rows) >= axis.epoch_end(self.epoch):
            # Where one window holds several epochs they share its losses.
            self._losses = [0.0, 0.0]
            self.end_epoch(self.epoch, loss_sum / count if count else float("nan"))
            self.epoch += 1
            self._set_scale()
        self.engine.recorder.enter("other")

    def _set_scale(self) -> None:
        """Follow the speeds with what the learning rates are multiplied by; a repeated run takes it from the log."""
        if isinstance(self.windows, RecordedWindows):
            self.scale = self.windows.scale
            return
        if not self.windows.is_measured:
            return
        wanted = self.engine.wanted_scale("auto", self.windows.speeds)
        if abs(wanted / self.scale - 1.0) <= CHANGE and self._is_scaled:
            return
        self._is_scaled, self.scale = True, wanted
        self.engine.recorder.event("lr_scale", scale=wanted)
        rate, rule = self.engine.schedule.plain[0], self.engine.config.lr_scale or "auto"
        if wanted != 1.0:
            self.notes.append(
                f"  learning rate {rate:g} -> {wanted * rate:g} (x{wanted:.2f}, lr_scale={rule!r}): averaging params "
                "over devices damps each one's steps; lr_scale=1.0 turns this off"
            )

    def _say_guard(self, fields: dict[str, float | list[int]], before: float) -> None:
        verb = "does not grow above" if fields["anchor"] == before else "shrinks to"
        self.notes.append(
            f"  guard: replicas drift apart (relative divergence {fields['divergence']:.3g}): the window {verb} "
            f"{fields['anchor']:.0f} batches of the slowest device; a smaller learning rate or lr_scale=1.0 helps"
        )

    def _claim(self, many: int) -> int:
        """The next slots from the count that all ranks share; the course learns what such a claim costs."""
        began_ns = self.engine.recorder.enter("communication")
        first = self.group.claim(many)
        ms = (self.engine.recorder.enter("other") - began_ns) / 1e6
        self.slot_schedule.claim_ms += 0.1 * (ms - self.slot_schedule.claim_ms)
        return first

    def _note_costs(self, arrived: Arrived, began_ns: int, here_ns: int, now_ns: int) -> None:
        own_ms = self._entering_ms + (now_ns - here_ns) / 1e6
        is_async = self.engine.config.policy == "async"
        self._wait_ms = ((here_ns - began_ns) if is_async else (arrived.met_ns - arrived.left_ns)) / 1e6
        self.transfer_ms = own_ms + (0.0 if is_async else (arrived.back_ns - arrived.met_ns) / 1e6)
        self._costs = RoundReport(
            transfer_ms=own_ms,
            latency_ms=(arrived.back_ns - arrived.left_ns) / 1e6,
            divergence=arrived.divergence,
        )
        self._delay = (here_ns - arrived.left_ns) / 1e6 * min(self.windows.speeds)
        self._trip_ns = (arrived.left_ns, arrived.met_ns, arrived.back_ns)
        self._wire_bytes = [self._wire_bytes[1], self.average.traffic.payload_bytes]

    def _trip(self) -> dict[str, float]:
        """The last round's way for the timeline, in ms before now: ranks' clocks are put together only later."""
        now_ns = self.engine.recorder.clock()
        left, met, back = ((now_ns - ns) / 1e6 for ns in self._trip_ns)
        before, after = self._wire_bytes
        return {"left_ms_ago": left, "met_ms_ago": met, "back_ms_ago": back, "bytes": after - before}

    def _note_broken(self, broken: list[int], rows: Sequence[RoundReport]) -> None:
        """Params that are not finite were left out of the average; once is said, twice running ends the run."""
        for rank in broken:
            if rank in self._broken:
                raise RankError(
                    f"rank {rank} has params that are not finite for the second time running: the learning rate may "
                    "be too high, or a batch holds numbers that are not finite"
                )
            lost = int(rows[rank].samples)
            self.engine.recorder.event("alert", what="not finite", broken=rank, samples=lost)
            self.notes.append(
                f"  rank {rank} had params that are not finite: it took the others' average, and what it had learned "
                f"from {lost} samples is lost"
            )
        self._broken = broken


def _with_losses(row: RoundReport, losses: tuple[float, float]) -> RoundReport:
    return row._replace(loss_sum=losses[0], loss_count=losses[1])
