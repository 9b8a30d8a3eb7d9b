"""The exact pace: all ranks take every step together, on one sum of gradients.

What a rank wants to tell the others (its time, a stop request, the proof that its policy agrees) rides in the sum.
A rank alone goes the same way; it only has nothing to sum.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from uneven.average.buffers import BufferAverage
from uneven.comm.collectives import broadcast_params
from uneven.comm.group import Group
from uneven.config import SHARDED
from uneven.data.feed import Micros
from uneven.data.replay import read_log
from uneven.parallel.batchnorm import describe_batchnorm, has_batchnorm, synced_buffers
from uneven.policy.axis import Part, part_of
from uneven.policy.calibrating import Calibrating
from uneven.policy.exact import Balanced, ExactPolicy, Fixed
from uneven.policy.finish import Cost
from uneven.policy.subset import advice, forecast
from uneven.step.captured import GRID, check_capturable
from uneven.step.costs import measure_sum_ms
from uneven.train.apply_strategy import apply_strategy
from uneven.train.engine import Engine
from uneven.train.status import STOP, check_agreement, check_status


class Row(NamedTuple):
    """What each rank tells the others with every gradient sum."""

    busy_ms: float  # its own work in this step
    is_odd: float  # 1 where that says nothing about its speed
    word: float
    fingerprint: float


class GradientSync:
    """Invariant: after every slot all ranks hold the same params, up to how their devices round.

    `is_stopping()` is this rank's own wish to stop.
    """

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
        self.policy: ExactPolicy = Fixed.even(engine.rank_info.world_size)
        self.buffers = BufferAverage(engine.model, synced_buffers(engine.model))
        self._is_model_parallel = (
            engine.rank_info.world_size > 1 and engine.config.is_model_parallel
        )  # all train all samples
        self.busy_ms: list[float] = []  # every rank's own work in the last step
        self._is_advised = False
        self._scale = 1.0  # of the learning rates
        self._weight = 0  # samples since the buffers were last averaged
        self._free_ns = 0  # when this rank last came out of a collective

    def meet(self, costs: Sequence[Cost]) -> None:
        """Round 0: everyone knows everyone's cost; the first shares follow from them."""
        engine, shares_known = self.engine, self.engine.config.has_fixed_shares
        if engine.rank_info.world_size == 1:
            self._scale = engine.wanted_scale(1.0, [1.0])
            return
        if engine.config.compile == "graph":
            check_capturable(engine.batchnorm_sync)
        engine.caps = tuple(min(pair) for pair in zip(engine.caps, (cost.cap for cost in costs), strict=True))
        if engine.batchnorm_sync.layers:
            engine.batchnorm_sync.group, engine.batchnorm_sync.enter = self.group, engine.recorder.enter
            _, ((self._dummy_batch, _),) = next(engine.feed.stream([Part(engine.axis.slot(0), 0, 1, 1)]))
        self.policy = self._make_policy(costs)
        first = engine.axis.slot(0).samples
        shares = list(self.policy.shares(0, first))
        self._scale = engine.wanted_scale(1.0, shares)
        is_measured = engine.is_rehearsed and not shares_known
        alone = [1e3 * engine.config.batch_size / cost.time_ms(engine.config.batch_size) for cost in costs]
        engine.recorder.event("shares", slot=0, shares=shares, alone=alone if is_measured else [])
        if not self._is_model_parallel:
            asked = engine.config.sync_batchnorm
            self.notes = describe_batchnorm(engine.model, engine.batchnorm_sync, asked, engine.is_rehearsed, shares)
        if sum(engine.caps) < first:
            held = ", ".join(f"{cap:g}" for cap in engine.caps)
            self.notes.append(f"  memory holds {held} of a step's {first} samples: shares run as micro-batches")
        self.notes += apply_strategy(engine, self.group, len(Row._fields) + 1)
        if is_measured:
            self._advise(costs)

    def reset_timer(self) -> None:
        """From now on the rank's time is its own work again: called after anything that is not a step."""
        self._free_ns = self.engine.recorder.enter("data")

    def parts(self) -> Iterator[Part]:
        rank_info = self.engine.rank_info
        for slot in self.engine.axis.slots():
            if self._is_model_parallel:
                yield Part(slot, slot.first, slot.samples, self.engine.batch(slot.samples))
                continue
            shares = self.policy.shares(slot.index, slot.samples)
            yield part_of(slot, shares, rank_info.rank, self.engine.batch(shares[rank_info.rank]))

    def train(self, part: Part, micros: Micros) -> bool:
        """One slot, and the end of its epoch where it is the last; returns whether the run is to stop after it."""
        is_stopped = self.step(part, micros)
        engine, slot = self.engine, part.slot
        if engine.trained == engine.axis.epoch_end(slot.epoch):
            engine.recorder.enter("compute")
            engine.run_ahead.drain()
            engine.recorder.enter("communication" if engine.rank_info.world_size > 1 else "other")
            self.end_epoch(slot.epoch, engine.meter.take(self.group))
            self._free_ns = engine.recorder.enter("other")
        if is_stopped:
            engine.recorder.event("stop", slot=engine.trained)
        return is_stopped

    def step(self, part: Part, micros: Micros) -> bool:
        engine = self.engine
        micros = engine.open(micros)
        began_ns = engine.recorder.enter("compute")
        engine.move_rates(part.slot.index, self._scale)
        if engine.rank_info.world_size > 1:
            is_stopped = self._step_together(part, micros + self._dummy_batches(part))
        else:
            engine.step_alone(part, micros, began_ns)
            engine.after_step(began_ns)
            is_stopped = self._is_stopping()
        engine.recorder.enter("other")
        is_counted = not self._is_model_parallel or engine.rank_info.rank == 0
        engine.note(part if is_counted else Part(part.slot, part.slot.stop, 0, part.batch))
        self._weight += part.samples
        return is_stopped

    def say(self, word: float) -> list[float]:
        """A sum without gradients in place of the next step's, for the word that rides in it; returns everybody's."""
        engine = self.engine
        samples = engine.axis.slot(min(engine.trained, engine.axis.total - 1)).samples
        row = Row(0.0, 1.0, word, float(self.policy.fingerprint()))
        rows, _ = engine.eager.sum_gradients([], samples, lambda: row)
        return [Row(*one).word for one in rows]

    def average_buffers(self) -> None:
        """Called where all ranks meet; afterwards all replicas are equal, buffers included."""
        if self.engine.rank_info.world_size > 1 and self.engine.has_cuda and self.engine.config.is_replicated:
            # A GPU and a CPU, or two kinds of GPU, round the same numbers differently: what is looked at is one model.
            model, equal = self.engine.model, synced_buffers(self.engine.model)
            broadcast_params(
                self.group, (*model.parameters(), *(b for name, b in model.named_buffers() if name in equal))
            )
        self.buffers.run(self.group, self._weight)
        self._weight = 0

    @property
    def epoch(self) -> int:
        return self.engine.trained // self.engine.axis.slots_per_epoch

    def ratio(self) -> tuple[int, ...]:
        return self.policy.shares(self.engine.trained, self.engine.axis.slot(0).samples)

    def show(self) -> dict[str, float]:
        return {}

    def finalize(self) -> None:
        self.engine.recorder.enter("compute")
        self.engine.run_ahead.drain()
        self.engine.recorder.enter("communication" if self.engine.rank_info.world_size > 1 else "other")
        self.average_buffers()

    def close(self) -> None:
        """The model is the user's alone again."""
        self.engine.eager.close()

    def _dummy_batches(self, part: Part) -> Micros:
        """Where ranks meet inside every micro-batch all of them run as many: the missing ones, of 0 samples."""
        if self._is_model_parallel or (self.engine.config.is_replicated and not self.engine.batchnorm_sync.is_open):
            return []
        shares = self.policy.shares(part.slot.index, part.slot.samples)
        most = max(-(-share // self.engine.batch(share, rank)) for rank, share in enumerate(shares))
        missing = range(most - len(part.sizes))
        # A strategy sits out by itself; layers of BatchNorm want a batch to pass.
        return [
            (self.engine.feed.open(self._dummy_batch) if self.engine.config.is_replicated else None, 0) for _ in missing
        ]

    def _step_together(self, part: Part, micros: Micros) -> bool:
        """A step whose gradients are summed over all ranks; speeds, stop requests and proofs ride along."""
        slot, recorder, traffic = part.slot, self.engine.recorder, self.group.traffic
        busy_ms = 0.0
        sent_ns = 0
        waited_s = traffic.wait_s

        def row() -> Row:
            # The clock of the policy: own work since the last collective, before waiting for anyone.
            nonlocal busy_ms, sent_ns
            self.engine.run_ahead.catch_up()
            began_ns = self._free_ns + int((traffic.wait_s - waited_s) * 1e9)
            self.engine.slow_down(began_ns)
            sent_ns = recorder.enter("wait")
            busy_ms = (sent_ns - began_ns) / 1e6
            word = STOP if self._is_stopping() else 0.0
            return Row(busy_ms, float(self.engine.is_odd(part)), word, float(self.policy.fingerprint()))

        told, counts = self.engine.sum_gradients(micros, slot.samples, row)
        rows = [Row(*one) for one in told]
        busy = self.busy_ms = [one.busy_ms for one in rows]
        # What the slowest rank took longer than this one was waiting; the rest was the wire.
        recorder.enter("communication", sent_ns + int((max(busy) - busy_ms) * 1e6))
        self._free_ns = recorder.enter("compute")
        words = [one.word for one in rows]
        check_status(words, slot.index)
        check_agreement([int(one.fingerprint) for one in rows], f"before slot {slot.index}")
        self.engine.eager.update(counts)
        # 0: not measured. Else shares would flee from a rank that captures, to sizes that must be captured in turn.
        move = self.policy.note(slot.index, slot.samples, [0.0 if one.is_odd else one.busy_ms for one in rows])
        if move is not None:
            recorder.event("share", slot=move.slot, shares=list(move.shares), gain=move.gain)
        if isinstance(self.policy, Calibrating) and self.policy.costs is not None and not self._is_advised:
            self._is_advised = True
            self._advise(self.policy.costs)
        return STOP in words

    def _advise(self, costs: Sequence[Cost]) -> None:
        """Say so where fewer devices would do; all ranks come here after the same slot.

        Devices that hold pieces are there for their memory, too.
        """
        engine = self.engine
        if engine.config.strategy in SHARDED:
            return
        found = forecast(costs, engine.axis.slot(0).samples, measure_sum_ms(self.group, engine.model))
        self.notes += advice(found, [str(device) for device in engine.rank_info.devices])

    def _make_policy(self, costs: Sequence[Cost]) -> ExactPolicy:
        engine, config = self.engine, self.engine.config
        if config.replay is not None:
            log = read_log(config.replay, engine.axis, engine.rank_info.world_size, config.to_json(), is_local=False)
            return log.shares(engine.axis.total)
        if config.shares is not None:
            return Fixed(config.shares)
        if config.policy == "sync" or self._is_model_parallel:
            return Fixed.even(engine.rank_info.world_size)
        least = 2 if has_batchnorm(engine.model) and not engine.batchnorm_sync.layers else 1
        samples, lookahead = engine.axis.slot(0).samples, engine.feed.lookahead
        caps = tuple(int(min(cap, samples)) for cap in engine.caps)
        if not engine.is_rehearsed:
            return Calibrating(engine.rank_info.world_size, samples, least=least, lookahead=lookahead, caps=caps)
        # A slot so small that ranks would go without has few sizes anyway. The same on all ranks, captured or not.
        is_on_grid = config.compile == "graph" and samples >= GRID * engine.rank_info.world_size
        return Balanced(tuple(costs), samples, caps, least, lookahead, GRID if is_on_grid else 1)
