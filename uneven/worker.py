"""One rank: batch -> step -> tell the policy -> (with several ranks) sum over all.

The loop is the program: `Worker.train` reads from top to bottom. Everything the rank does is in exactly one
state of its recorder, so where the time went is never a guess. A rank alone and a rank among others run the same
lines; only the step itself asks whether there are gradients to sum.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from uneven.average.buffers import BufferAverage
from uneven.comm.group import Group
from uneven.config import Evaluation, RunConfig, Task
from uneven.data.feed import Feed, Micros, make_feed
from uneven.data.replay import read_replay
from uneven.hardware.throttle import Throttle
from uneven.parallel.batchnorm import Circle, describe_batchnorm, synced_buffers, synchronise
from uneven.parallel.gradients import GradientRoad
from uneven.policy.axis import Axis, Part, part_of
from uneven.policy.exact import Balanced, ExactPolicy, Fixed
from uneven.policy.finish import Cost
from uneven.policy.subset import advice, forecast
from uneven.seat import RankResult, Report, Seat
from uneven.state import TrainedState, capture_state
from uneven.step.company import STOP, check_company
from uneven.step.costs import measure_cost, measure_sum_ms
from uneven.step.eager import EagerStep
from uneven.step.evaluation import evaluate
from uneven.step.graph import GraphStep
from uneven.step.meter import LossMeter
from uneven.step.precision import Precision, device_flags
from uneven.step.runahead import RunAhead
from uneven.step.schedule import Schedule
from uneven.step.warmup import no_trace
from uneven.timeline.export import Timeline
from uneven.timeline.record import Recorder
from uneven.timeline.sample import Sampler

__all__ = ["RankResult", "Seat", "Worker"]
ROW = ("busy_ms", "stop", "fingerprint")  # what each rank tells the others with every gradient sum


class Worker:
    """Life cycle: made on the thread that trains, `train()` once. `join(model)` forms the group."""

    def __init__(
        self,
        task: Task,
        config: RunConfig,
        seat: Seat,
        join: Callable[[nn.Module], Group],
        stop: threading.Event,
        report: Report,
    ) -> None:
        self.recorder = Recorder(seat.rank)
        self.task, self.config, self.seat = task, config, seat
        self.join, self.stop, self.report = join, stop, report
        self.notes: list[str] = []  # what the user should know, printed once
        self.after_joining: Callable[[Worker], None] = lambda _: None
        self.history: list[dict[str, Any]] = []
        self.log: list[tuple[int, int, int]] = []
        self.axis = Axis(len(task.dataset), config.slot_size(seat.size), config.epochs)

        self.on = torch.device(seat.device.torch_name)
        torch.manual_seed(config.seed)
        # Made on the CPU and then moved, so that a seed gives the same model on every device.
        self.model = task.make_model().to(self.on)
        self.model.train()
        # Alone, BatchNorm sees all samples anyway.
        self.circle = synchronise(self.model) if config.sync_batchnorm and seat.size > 1 else Circle()
        self.optimizer = task.make_optimizer(self.model.parameters())
        self.schedule = Schedule(task.make_scheduler, self.optimizer, self.axis.schedule_length)
        self.meter = LossMeter(self.on)
        self.eager = EagerStep(
            self.model,
            self.optimizer,
            task.train_step,
            Precision(config.precision, self.on),
            self.meter,
            config.max_grad_norm,
            self.circle,
        )
        self.feed: Feed = make_feed(task.dataset, self.on, config.seed, config.batch_size, config.workers)
        self._test_feed: Feed | None = None
        self.graph: GraphStep | None = None
        self.run_ahead = RunAhead(self.on)
        self.throttle = Throttle(seat.device.speed)
        self.policy: ExactPolicy = Fixed.even(seat.size)
        self.trained = 0  # slots
        self._own_samples = 0
        self._weight = 0  # samples since the buffers were last averaged
        self._told_s = 0.0
        self._free_ns = 0  # when this rank last came out of a collective
        self.busy_ms: list[float] = []  # every rank's own work in the last step
        self.measured_from = 0  # the first slot whose times say something about later ones
        self._sampler = Sampler()

    def train(self) -> RankResult:
        """Train every slot, or up to the stop request; the state returned is complete either way."""
        with self.recording():
            self.prepare()
            self.report.started(self.axis, self.feed.place)
            self.rejoin()
            for part, micros in self.feed.stream(self.parts()):
                if self.train_slot(part, micros):
                    break
                self.recorder.enter("data")
            self.conclude()
        return self.result()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """All of the rank's work lies inside; afterwards `result` may be asked."""
        self._sampler.start()
        try:
            with device_flags(self.on):
                yield
        finally:
            self.recorder.close()
            self._sampler.stop()

    def train_slot(self, part: Part, micros: Micros) -> bool:
        """The next slot, and the end of its epoch where it is the last; returns whether the run is to stop."""
        is_stopped = self.train_part(part, micros)
        self.trained = part.slot.index + 1
        if self.trained == self.axis.epoch_end(part.slot.epoch):
            self._end_epoch(part.slot.epoch)
        if is_stopped:
            self.recorder.event("stop", slot=self.trained)
        return is_stopped

    def conclude(self) -> None:
        """After the last slot: from here on all replicas are equal, buffers included."""
        self.recorder.enter("compute")
        self.run_ahead.drain()
        self._average_buffers()

    def result(self) -> RankResult:
        timeline = Timeline.of(self.recorder, str(self.seat.device), self._sampler.samples)
        return RankResult(self._state(), timeline, self.log, self.group.traffic)

    def prepare(self) -> None:
        """Everything before the first slot: compile and warm up alone, then form the group and meet in round 0."""
        self._warm_up()
        self.meet(self._measure_cost())

    def meet(self, cost: Cost) -> None:
        """Form the group; round 0 shares out by the ranks' costs."""
        self.group = self.join(self.model)
        self._round_zero(cost)
        self.after_joining(self)

    def rejoin(self) -> None:
        """From now on the rank's time is its own work again: called after anything that is not a step."""
        self._free_ns = self.recorder.enter("data")

    def parts(self) -> Iterator[Part]:
        for slot in self.axis.slots():
            shares = self.policy.shares(slot.index, slot.samples)
            yield part_of(slot, shares, self.seat.rank, self._batch(shares[self.seat.rank]))

    def _batch(self, share: int) -> int:
        return max(self.config.batch_size, -(-share // self.config.accumulate))

    def train_part(self, part: Part, micros: Micros) -> bool:
        """One slot on this rank; returns whether the run is to stop after it."""
        slot = part.slot
        if self.graph is None:
            micros = [(self.feed.open(inputs), samples) for inputs, samples in micros]
        began_ns = self.recorder.enter("compute")
        self.schedule.move_to(self.axis.schedule_position(slot.index))
        if self.seat.size > 1:
            is_stopped = self._step_together(part, micros + self._phantoms(part))
        else:
            (self.graph or self.eager)(micros, slot.samples)
            self.slow_down(began_ns)
            is_stopped = self.stop.is_set()
        self.run_ahead.after_step()
        now_ns = self.recorder.enter("other")
        self.log.append((slot.index, part.first, part.samples))
        self._own_samples += part.samples
        self._weight += part.samples
        # Ten reports a second are as many as a person can read; each costs a few microseconds.
        if now_ns / 1e9 - self._told_s >= 0.1:
            self._told_s = now_ns / 1e9
            samples = self.axis.samples_before(slot.index) + slot.samples
            seconds = self.recorder.account().training_s
            self.report.stepped(samples, self._own_samples, seconds, self.meter.glance())
        return is_stopped

    def _phantoms(self, part: Part) -> Micros:
        """With synchronised BatchNorm all ranks run as many micro-batches: the missing ones, of 0 samples."""
        if not self.circle.is_open:
            return []
        shares = self.policy.shares(part.slot.index, part.slot.samples)
        most = max(-(-share // self._batch(share)) for share in shares)
        return [(self.feed.open(self._phantom), 0) for _ in range(most - len(part.sizes))]

    def _step_together(self, part: Part, micros: Micros) -> bool:
        """A step whose gradients are summed over all ranks; speeds, stop requests and proofs ride along."""
        slot = part.slot
        busy_ms = 0.0
        sent_ns = 0
        waited_s = self.group.traffic.wait_s

        def row() -> list[float]:
            # The clock of the policy: own work since the last collective, before waiting for anyone.
            nonlocal busy_ms, sent_ns
            began_ns = self._free_ns + int((self.group.traffic.wait_s - waited_s) * 1e9)
            self.slow_down(began_ns)
            sent_ns = self.recorder.enter("wait")
            busy_ms = (sent_ns - began_ns) / 1e6
            return [busy_ms, float(self.stop.is_set()), float(self.policy.fingerprint())]

        rows, counts = self.eager.sum_gradients(micros, slot.samples, row)
        busy = self.busy_ms = [one[0] for one in rows]
        # What the slowest rank took longer than this one was waiting; the rest was the wire.
        self.recorder.enter("communication", sent_ns + int((max(busy) - busy_ms) * 1e6))
        self._free_ns = self.recorder.enter("compute")
        check_company([one[1] for one in rows], slot.index)
        self._check_fingerprints([int(one[2]) for one in rows], slot.index)
        self.eager.update(counts)
        move = self.policy.note(slot.index, slot.samples, busy) if slot.index >= self.measured_from else None
        if move is not None:
            self.recorder.event("share", slot=move.slot, shares=list(move.shares), gain=move.gain)
        return any(one[1] == STOP for one in rows)

    def slow_down(self, began_ns: int) -> None:
        if self.seat.device.speed < 1:
            self.run_ahead.drain()
            self.throttle.pause((self.recorder.clock() - began_ns) / 1e9)

    def _check_fingerprints(self, prints: list[int], slot: int) -> None:
        for rank, one in enumerate(prints):
            if one != prints[0]:
                raise RuntimeError(f"rank {rank} decided otherwise than rank 0 before slot {slot}: {prints}")

    def _warm_up(self) -> None:
        """Compile, capture and let CUDA choose its kernels before the training clock starts; leaves no trace.

        Both sizes of slot are run, the full one and an epoch's shorter last one. An eager CPU has nothing to
        warm up.
        """
        if self.config.compile == "off" and self.on.type == "cpu":
            return
        self.recorder.enter("compile")
        if self.config.compile == "default":
            self.model.compile()
        ends = (self.axis.slot(0), self.axis.slot(self.axis.slots_per_epoch - 1))
        parts = {slot.samples: self._rehearsal(slot.samples) for slot in ends}
        with no_trace(self.eager, self.on):
            for part, micros in self.feed.stream(parts.values()):
                self.eager([(self.feed.open(inputs), samples) for inputs, samples in micros], part.samples)
        if self.config.compile == "graph":
            part, micros = next(self.feed.stream([parts[self.axis.slot(0).samples]]))
            self.graph = GraphStep(self.eager, self.feed.open, self.on)
            self.graph.capture(micros, part.samples)
        self.run_ahead.drain()
        self.recorder.enter("setup")

    def _rehearsal(self, samples: int) -> Part:
        """A part of the first slot with this many samples, trained only to warm up."""
        each = -(-samples // self.seat.size)
        return Part(self.axis.slot(0), 0, each, max(self.config.batch_size, -(-each // self.config.accumulate)))

    def _measure_cost(self) -> Cost:
        """This rank's own speed, before the group forms, so that round 0 can set the first shares."""
        if self.seat.size == 1 or self.config.is_shared_out:
            return Cost(0.0, 1.0)
        self.recorder.enter("compile")

        def run_step(samples: int) -> None:
            began_ns = self.recorder.clock()
            _, micros = next(self.feed.stream([Part(self.axis.slot(0), 0, samples, max(samples, 1))]))
            self.eager([(self.feed.open(inputs), count) for inputs, count in micros], samples)
            self.slow_down(began_ns)

        with no_trace(self.eager, self.on):
            cost = measure_cost(run_step, min(self.axis.slot(0).samples, -(-self.axis.slot_size // self.seat.size)))
        self.recorder.enter("setup")
        return cost

    def _round_zero(self, cost: Cost) -> None:
        """The group's first meeting: rank 0's values become everyone's, and every rank's cost is known to all."""
        self.buffers = BufferAverage(self.model, synced_buffers(self.model))
        if self.seat.size == 1:
            return
        if self.circle.layers:
            self.circle.group, self.circle.enter = self.group, self.recorder.enter
            _, ((self._phantom, _),) = next(self.feed.stream([Part(self.axis.slot(0), 0, 1, 1)]))
        self.recorder.enter("communication")
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            self.group.broadcast_(tensor.detach()).wait()
        costs = torch.zeros(self.seat.size, 2, dtype=torch.float64)
        costs[self.seat.rank] = torch.tensor([cost.fixed_ms, cost.sample_ms])
        self.group.sum_(costs).wait()
        known = [Cost(*one) for one in costs.tolist()]
        self.policy = self._make_policy(known)
        shares = list(self.policy.shares(0, self.axis.slot(0).samples))
        is_measured = not self.config.is_shared_out and self.measured_from == 0  # else nothing is known yet
        alone = [1e3 * self.config.batch_size / cost.time_ms(self.config.batch_size) for cost in known]
        self.recorder.event("shares", slot=0, shares=shares, alone=alone if is_measured else [])
        self.notes = describe_batchnorm(self.model, self.circle, self.config.sync_batchnorm, shares)
        # Layers that wait for each other in backward keep their order only if nothing is sent in between.
        self.eager.road = GradientRoad(
            list(self.model.parameters()), self.group, len(ROW) + 1, overlaps=not self.circle.layers
        )
        if is_measured:
            numbers = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
            found = forecast(known, self.axis.slot(0).samples, measure_sum_ms(self.group, numbers))
            line = advice(found, [str(device) for device in self.seat.devices])
            self.notes += [line] if line else []
        if self.seat.rank > 0:
            torch.manual_seed(self.config.seed + 7919 * self.seat.rank)  # other dropout than rank 0
        self.recorder.enter("setup")

    def _make_policy(self, costs: list[Cost]) -> ExactPolicy:
        if self.config.replay is not None:
            return read_replay(self.config.replay, self.axis, self.seat.size, self.config.to_json())
        if self.config.shares is not None:
            return Fixed(self.config.shares)
        if self.config.policy == "sync":
            return Fixed.even(self.seat.size)
        has_batchnorm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.model.modules())
        least = 2 if has_batchnorm and not self.circle.layers else 1
        return Balanced(tuple(costs), self.axis.slot(0).samples, None, least, self.feed.lookahead)

    def _end_epoch(self, epoch: int) -> None:
        self.recorder.enter("compute")
        self.run_ahead.drain()
        self.recorder.enter("communication" if self.seat.size > 1 else "other")
        loss = self.meter.take(self.group)
        self.recorder.enter("other")
        seconds = self.recorder.account().training_s
        before = self.history[-1]["train_seconds"] if self.history else 0.0
        entry = {
            "epoch": epoch + 1,
            "samples": self.axis.samples_before(self.trained),
            "train_loss": loss,
            "lr": self.schedule.rates[0],
            "train_seconds": seconds,
            "samples_per_s": self.axis.samples / max(seconds - before, 1e-9),
        }
        is_last = epoch + 1 == self.config.epochs
        evaluation = self.task.evaluation
        if evaluation is not None and (is_last or (epoch + 1) % evaluation.every == 0):
            self.recorder.enter("evaluation")
            self._average_buffers()
            entry |= self._evaluate(evaluation)
        self.history.append(entry)
        every = self.config.checkpoint_every
        if every is not None and self.config.out is not None and (epoch + 1) % every == 0 and not is_last:
            self.recorder.enter("checkpoint")
            self._average_buffers()
            if self.seat.rank == 0:
                self._state().save(self.config.out / f"epoch-{epoch + 1}")
        self._free_ns = self.recorder.enter("other")
        self.recorder.event("epoch", **entry)
        self.report.epoch_done(entry)

    def _average_buffers(self) -> None:
        self.buffers.run(self.group, self._weight)
        self._weight = 0

    def _evaluate(self, evaluation: Evaluation) -> dict[str, float]:
        if self._test_feed is None:
            batch_size = evaluation.batch_size or self.config.batch_size
            self._test_feed = make_feed(evaluation.dataset, self.on, self.config.seed, batch_size)
        # By speed, as in training; everyone at least one sample, so that all know which metrics there are.
        ratio = self.policy.shares(self.trained, self.axis.slot(0).samples)
        shares = Fixed(tuple(max(1.0, float(share)) for share in ratio)).shares(0, len(evaluation.dataset))
        first = sum(shares[: self.seat.rank])
        own = (first, first + shares[self.seat.rank])
        return evaluate(
            self.model, evaluation.eval_step, self._test_feed, self.eager.precision, self.group, own, self.stop
        )

    def _state(self) -> TrainedState:
        return TrainedState(
            **capture_state(self.model, self.optimizer),
            history=list(self.history),
            config=self.config.to_json(),
            slot=self.trained,
            samples=self.axis.samples_before(self.trained),
            dataset_samples=self.axis.samples,
            finished=self.trained == self.axis.total,
        )
