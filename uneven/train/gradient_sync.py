"""The exact pace: all ranks take every step together, on one sum of gradients.

What a rank wants to tell the others (its time, a stop request, the proof that its policy agrees) rides in the sum.
A rank alone goes the same way; it only has nothing to sum.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from uneven.average.buffers import BufferAverage
from uneven.comm.collectives import spread
from uneven.comm.group import Group
from uneven.config import CUTTING
from uneven.data.feed import Micros
from uneven.data.replay import read_log
from uneven.parallel.batchnorm import describe_batchnorm, has_batchnorm, synced_buffers
from uneven.policy.axis import Part, part_of
from uneven.policy.calibrating import Learned
from uneven.policy.exact import Balanced, ExactPolicy, Fixed
from uneven.policy.finish import Cost
from uneven.policy.subset import advice, forecast
from uneven.step.captured import GRID, check_capturable
from uneven.step.costs import measure_sum_ms
from uneven.train.apply_strategy import hold
from uneven.train.engine import Rig
from uneven.train.status import STOP, check_agreement, check_company


class Row(NamedTuple):
    """What each rank tells the others with every gradient sum."""

    busy_ms: float  # its own work in this step
    is_odd: float  # 1 where that says nothing about its speed
    word: float
    fingerprint: float


class ExactPace:
    """Invariant: after every slot all ranks hold the same params, up to how their devices round.

    `is_stopping()` is this rank's own wish to stop.
    """

    def __init__(
        self,
        rig: Rig,
        group: Group,
        is_stopping: Callable[[], bool],
        end_epoch: Callable[[int, float], None],
    ) -> None:
        self.rig, self.group = rig, group
        self._is_stopping, self.end_epoch = is_stopping, end_epoch
        self.notes: list[str] = []
        self.policy: ExactPolicy = Fixed.even(rig.seat.size)
        self.buffers = BufferAverage(rig.model, synced_buffers(rig.model))
        self._is_together = rig.seat.size > 1 and rig.config.is_together  # all train all samples
        self.busy_ms: list[float] = []  # every rank's own work in the last step
        self._is_advised = False
        self._scale = 1.0  # of the learning rates
        self._weight = 0  # samples since the buffers were last averaged
        self._free_ns = 0  # when this rank last came out of a collective

    def meet(self, costs: Sequence[Cost]) -> None:
        """Round 0: everyone knows everyone's cost; the first shares follow from them."""
        rig, shares_known = self.rig, self.rig.config.is_shared_out
        if rig.seat.size == 1:
            self._scale = rig.wanted_scale(1.0, [1.0])
            return
        if rig.config.compile == "graph":
            check_capturable(rig.circle)
        rig.caps = tuple(min(pair) for pair in zip(rig.caps, (cost.cap for cost in costs), strict=True))
        if rig.circle.layers:
            rig.circle.group, rig.circle.enter = self.group, rig.recorder.enter
            _, ((self._phantom, _),) = next(rig.feed.stream([Part(rig.axis.slot(0), 0, 1, 1)]))
        self.policy = self._make_policy(costs)
        first = rig.axis.slot(0).samples
        shares = list(self.policy.shares(0, first))
        self._scale = rig.wanted_scale(1.0, shares)
        is_measured = rig.is_rehearsed and not shares_known
        alone = [1e3 * rig.config.batch_size / cost.time_ms(rig.config.batch_size) for cost in costs]
        rig.recorder.event("shares", slot=0, shares=shares, alone=alone if is_measured else [])
        if not self._is_together:
            asked = rig.config.sync_batchnorm
            self.notes = describe_batchnorm(rig.model, rig.circle, asked, rig.is_rehearsed, shares)
        if sum(rig.caps) < first:
            held = ", ".join(f"{cap:g}" for cap in rig.caps)
            self.notes.append(f"  memory holds {held} of a step's {first} samples: shares run as micro-batches")
        self.notes += hold(rig, self.group, len(Row._fields) + 1)
        if is_measured:
            self._advise(costs)

    def rejoin(self) -> None:
        """From now on the rank's time is its own work again: called after anything that is not a step."""
        self._free_ns = self.rig.recorder.enter("data")

    def parts(self) -> Iterator[Part]:
        seat = self.rig.seat
        for slot in self.rig.axis.slots():
            if self._is_together:
                yield Part(slot, slot.first, slot.samples, self.rig.batch(slot.samples))
                continue
            shares = self.policy.shares(slot.index, slot.samples)
            yield part_of(slot, shares, seat.rank, self.rig.batch(shares[seat.rank]))

    def train(self, part: Part, micros: Micros) -> bool:
        """One slot, and the end of its epoch where it is the last; returns whether the run is to stop after it."""
        is_stopped = self.step(part, micros)
        rig, slot = self.rig, part.slot
        if rig.trained == rig.axis.epoch_end(slot.epoch):
            rig.recorder.enter("compute")
            rig.run_ahead.drain()
            rig.recorder.enter("communication" if rig.seat.size > 1 else "other")
            self.end_epoch(slot.epoch, rig.meter.take(self.group))
            self._free_ns = rig.recorder.enter("other")
        if is_stopped:
            rig.recorder.event("stop", slot=rig.trained)
        return is_stopped

    def step(self, part: Part, micros: Micros) -> bool:
        rig = self.rig
        micros = rig.open(micros)
        began_ns = rig.recorder.enter("compute")
        rig.move_rates(part.slot.index, self._scale)
        if rig.seat.size > 1:
            is_stopped = self._step_together(part, micros + self._phantoms(part))
        else:
            rig.step_alone(part, micros, began_ns)
            rig.after_step(began_ns)
            is_stopped = self._is_stopping()
        rig.recorder.enter("other")
        is_counted = not self._is_together or rig.seat.rank == 0
        rig.note(part if is_counted else Part(part.slot, part.slot.stop, 0, part.batch))
        self._weight += part.samples
        return is_stopped

    def say(self, word: float) -> list[float]:
        """A sum without gradients in place of the next step's, for the word that rides in it; returns everybody's."""
        rig = self.rig
        samples = rig.axis.slot(min(rig.trained, rig.axis.total - 1)).samples
        row = Row(0.0, 1.0, word, float(self.policy.fingerprint()))
        rows, _ = rig.eager.sum_gradients([], samples, lambda: row)
        return [Row(*one).word for one in rows]

    def average_buffers(self) -> None:
        """Called where all ranks meet; afterwards all replicas are equal, buffers included."""
        if self.rig.seat.size > 1 and self.rig.has_cuda and self.rig.config.is_replicated:
            # A GPU and a CPU, or two kinds of GPU, round the same numbers differently: what is looked at is one model.
            model, equal = self.rig.model, synced_buffers(self.rig.model)
            spread(self.group, (*model.parameters(), *(b for name, b in model.named_buffers() if name in equal)))
        self.buffers.run(self.group, self._weight)
        self._weight = 0

    @property
    def epoch(self) -> int:
        return self.rig.trained // self.rig.axis.slots_per_epoch

    def ratio(self) -> tuple[int, ...]:
        return self.policy.shares(self.rig.trained, self.rig.axis.slot(0).samples)

    def show(self) -> dict[str, float]:
        return {}

    def conclude(self) -> None:
        self.rig.recorder.enter("compute")
        self.rig.run_ahead.drain()
        self.rig.recorder.enter("communication" if self.rig.seat.size > 1 else "other")
        self.average_buffers()

    def close(self) -> None:
        """The model is the user's alone again."""
        self.rig.eager.close()

    def _phantoms(self, part: Part) -> Micros:
        """Where ranks meet inside every micro-batch all of them run as many: the missing ones, of 0 samples."""
        if self._is_together or (self.rig.config.is_replicated and not self.rig.circle.is_open):
            return []
        shares = self.policy.shares(part.slot.index, part.slot.samples)
        most = max(-(-share // self.rig.batch(share, rank)) for rank, share in enumerate(shares))
        missing = range(most - len(part.sizes))
        # A strategy sits out by itself; layers of BatchNorm want a batch to pass.
        return [(self.rig.feed.open(self._phantom) if self.rig.config.is_replicated else None, 0) for _ in missing]

    def _step_together(self, part: Part, micros: Micros) -> bool:
        """A step whose gradients are summed over all ranks; speeds, stop requests and proofs ride along."""
        slot, recorder, traffic = part.slot, self.rig.recorder, self.group.traffic
        busy_ms = 0.0
        sent_ns = 0
        waited_s = traffic.wait_s

        def row() -> Row:
            # The clock of the policy: own work since the last collective, before waiting for anyone.
            nonlocal busy_ms, sent_ns
            self.rig.run_ahead.catch_up()
            began_ns = self._free_ns + int((traffic.wait_s - waited_s) * 1e9)
            self.rig.slow_down(began_ns)
            sent_ns = recorder.enter("wait")
            busy_ms = (sent_ns - began_ns) / 1e6
            word = STOP if self._is_stopping() else 0.0
            return Row(busy_ms, float(self.rig.is_odd(part)), word, float(self.policy.fingerprint()))

        told, counts = self.rig.sum_gradients(micros, slot.samples, row)
        rows = [Row(*one) for one in told]
        busy = self.busy_ms = [one.busy_ms for one in rows]
        # What the slowest rank took longer than this one was waiting; the rest was the wire.
        recorder.enter("communication", sent_ns + int((max(busy) - busy_ms) * 1e6))
        self._free_ns = recorder.enter("compute")
        words = [one.word for one in rows]
        check_company(words, slot.index)
        check_agreement([int(one.fingerprint) for one in rows], f"before slot {slot.index}")
        self.rig.eager.update(counts)
        # 0: not measured. Else shares would flee from a rank that captures, to sizes that must be captured in turn.
        move = self.policy.note(slot.index, slot.samples, [0.0 if one.is_odd else one.busy_ms for one in rows])
        if move is not None:
            recorder.event("share", slot=move.slot, shares=list(move.shares), gain=move.gain)
        if isinstance(self.policy, Learned) and self.policy.costs is not None and not self._is_advised:
            self._is_advised = True
            self._advise(self.policy.costs)
        return STOP in words

    def _advise(self, costs: Sequence[Cost]) -> None:
        """Say so where fewer devices would do; all ranks come here after the same slot.

        Devices that hold pieces are there for their memory, too.
        """
        rig = self.rig
        if rig.config.strategy in CUTTING:
            return
        found = forecast(costs, rig.axis.slot(0).samples, measure_sum_ms(self.group, rig.model))
        self.notes += advice(found, [str(device) for device in rig.seat.devices])

    def _make_policy(self, costs: Sequence[Cost]) -> ExactPolicy:
        rig, config = self.rig, self.rig.config
        if config.replay is not None:
            log = read_log(config.replay, rig.axis, rig.seat.size, config.to_json(), is_local=False)
            return log.shares(rig.axis.total)
        if config.shares is not None:
            return Fixed(config.shares)
        if config.policy == "sync" or self._is_together:
            return Fixed.even(rig.seat.size)
        least = 2 if has_batchnorm(rig.model) and not rig.circle.layers else 1
        samples, lookahead = rig.axis.slot(0).samples, rig.feed.lookahead
        caps = tuple(int(min(cap, samples)) for cap in rig.caps)
        if not rig.is_rehearsed:
            return Learned(rig.seat.size, samples, least=least, lookahead=lookahead, caps=caps)
        # A slot so small that ranks would go without has few sizes anyway. The same on all ranks, captured or not.
        is_on_grid = config.compile == "graph" and samples >= GRID * rig.seat.size
        return Balanced(tuple(costs), samples, caps, least, lookahead, GRID if is_on_grid else 1)
