"""One rank's training loop: batch -> step -> policy -> gradient sum or average.

`Worker.train` reads from top to bottom. The engine is the rank by itself, the synchronizer keeps it in step with the
others: GradientSync by a sum of gradients in every step, LocalSGD by averages of params in rounds. At every moment
the recorder is in exactly one state, so the timeline accounts for all of the rank's time.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from uneven.comm.collectives import broadcast_params
from uneven.comm.gather import gather_rows
from uneven.comm.group import Group
from uneven.config import Evaluation, RunConfig, Task
from uneven.data.feed import Feed, Micros, make_feed
from uneven.errors import NotFiniteError
from uneven.hardware.device import needs_ranks
from uneven.policy.axis import Axis, Part
from uneven.policy.exact import Fixed
from uneven.policy.finish import Cost
from uneven.results.state import TrainedState, capture_state, join_state
from uneven.step.eager import EagerStep
from uneven.step.evaluation import evaluate
from uneven.step.precision import device_flags
from uneven.timeline.record import Recorder
from uneven.timeline.sample import Sampler
from uneven.timeline.timeline import Timeline
from uneven.train.apply_strategy import choose_activations
from uneven.train.engine import Engine
from uneven.train.gradient_sync import GradientSync
from uneven.train.local_sgd import LocalSGD
from uneven.train.rank_info import RankInfo, RankResult, Report
from uneven.train.synchronizer import Synchronizer

REPORT_EVERY_S = 0.1  # more often than a person can read; a report costs a few microseconds
UNMEASURED = Cost(0.0, 1.0)


class Worker:
    """Life cycle: made on the thread that trains, `train()` once. `join(model)` forms the group.

    With `is_own_loop` the user's loop takes the place of `train`: it calls `initialize`, `train_part` and `result`.
    """

    def __init__(
        self,
        task: Task,
        config: RunConfig,
        rank_info: RankInfo,
        join: Callable[[nn.Module], Group],
        stop: threading.Event,
        report: Report,
        *,
        is_own_loop: bool = False,
    ) -> None:
        self.task, self.config, self.rank_info = task, config, rank_info
        self.join, self.stop, self.report = join, stop, report
        self.recorder = Recorder(rank_info.rank)
        self.engine = Engine(task, config, rank_info, self.recorder, is_own_loop=is_own_loop)
        self.history: list[dict[str, Any]] = []
        self.synchronizer: Synchronizer | None = None
        self.epoch_metrics: Callable[[int], dict[str, float]] | None = None  # of the user's loop; a collective
        self._reported_notes = 0
        self._reported_s = 0.0
        self._test_feed: Feed | None = None
        self._sampler = Sampler()

    @property
    def axis(self) -> Axis:
        return self.engine.axis

    @property
    def group(self) -> Group:
        return self.rank_info.group

    def train(self, make_step: "Callable[[Worker], EagerStep] | None" = None) -> RankResult:
        """Train every slot, or up to a stop request; the returned state is complete either way.

        `make_step` is called once the group has formed; its step then trains the model in place of our own.
        """
        with self.recording():
            synchronizer = self.prepare()
            if make_step is not None:
                self.engine.use_step(make_step(self))
            self.report.started(self.axis, self.engine.feed.place)
            synchronizer.reset_timer()
            for part, micros in self.engine.feed.stream(synchronizer.parts()):
                if self.train_part(synchronizer, part, micros):
                    break
                self.recorder.enter("data")
            synchronizer.finalize()
            self._report_notes(synchronizer)
        return self.result()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """All of the rank's work lies inside; `result` may be called afterwards."""
        self._sampler.start()
        try:
            with device_flags(self.engine.device):
                yield
        finally:
            self.recorder.close()
            self._sampler.stop()
            self._test_feed = None  # ends loader processes that it kept

    def prepare(self) -> Synchronizer:
        """Everything before the first slot: compile, warm up and measure alone, then form the group."""
        if lines := choose_activations(self.engine):
            self.report.say(lines)
        if not self.engine.can_warm_up:
            return self.initialize(UNMEASURED)
        self.engine.warm_up()
        is_measured = self.rank_info.world_size > 1 and not self.config.has_fixed_shares
        return self.initialize(self.engine.measure() if is_measured else UNMEASURED)

    def initialize(self, cost: Cost) -> Synchronizer:
        """Form the group. In round 0 all ranks take rank 0's params and learn every rank's cost."""
        info, engine = self.rank_info, self.engine
        info.join(self.join(engine.model))
        is_local = self.config.is_local and info.world_size > 1
        kind: type[LocalSGD] | type[GradientSync] = LocalSGD if is_local else GradientSync
        synchronizer: Synchronizer = kind(engine, self.stop.is_set, self._end_epoch)
        self.recorder.enter("communication")
        broadcast_params(info.group, (*engine.model.parameters(), *engine.model.buffers()))
        rows = gather_rows(info.group, (cost.fixed_ms, cost.sample_ms, cost.cap))
        synchronizer.initialize([Cost(*row) for row in rows])
        if info.rank > 0 and not self.config.is_model_parallel:
            torch.manual_seed(self.config.seed + 7919 * info.rank)  # each rank draws its own dropout masks
        self.synchronizer = synchronizer
        self._report_notes(synchronizer)
        self.recorder.enter("setup")
        return synchronizer

    def train_part(self, synchronizer: Synchronizer, part: Part, micros: Micros) -> bool:
        """Train the next part and report progress now and then; returns whether the run stops here."""
        try:
            is_stopped = synchronizer.train(part, micros)
        except NotFiniteError:
            self._report_notes(synchronizer)  # the steps that led to it
            raise
        now_s = self.recorder.clock() / 1e9
        if now_s - self._reported_s >= REPORT_EVERY_S:
            self._reported_s = now_s
            seconds = self.recorder.account().training_s
            samples = self.engine.samples_before(self.engine.trained)
            self.report.stepped(samples, self.engine.samples, seconds, self.engine.meter.glance())
            self._report_notes(synchronizer)
        return is_stopped

    def result(self) -> RankResult:
        engine = self.engine
        if engine.device.type == "cuda":
            self.recorder.event("memory", peak_bytes=torch.cuda.max_memory_allocated(engine.device))
        device = str(self.rank_info.device)
        timeline = Timeline.of(self.recorder, device, self._sampler.samples, engine.run_ahead.busy)
        state, dropped = self._state(), list(engine.dropped.parts)
        self._check_finite(state.params)
        return RankResult(state, timeline, engine.log, list(engine.rounds), self.group.traffic, dropped)

    def show(self) -> dict[str, Any]:
        """Where the rank is; called from the heartbeat's thread at any moment."""
        rounds = self.synchronizer.progress() if self.synchronizer is not None else {}
        return {
            "slot": self.engine.trained,
            "phase": self.recorder.state,
            "rounds": rounds,
            "deadline": self.config.deadline,
        }

    def _report_notes(self, synchronizer: Synchronizer) -> None:
        if len(synchronizer.notes) > self._reported_notes:
            self.report.say(synchronizer.notes[self._reported_notes :])
            self._reported_notes = len(synchronizer.notes)

    def _end_epoch(self, epoch: int, loss: float, *, first: int, last: int) -> None:
        """All ranks have passed this epoch and, where it is evaluated or saved, hold the same params.

        Where loss and speed are known only over several epochs, `first` to `last`, the entry says so in "epochs".
        """
        self.recorder.enter("other")
        seconds = self.history[first]["train_seconds"] if epoch > first else self.recorder.account().training_s
        before = self.history[first - 1]["train_seconds"] if first else 0.0
        skipped = dict(self.engine.skipped)
        samples = (last - first + 1) * self.axis.samples - skipped.get(epoch, 0)
        entry = {
            "epoch": epoch + 1,
            **({"epochs": [first + 1, last + 1]} if last > first else {}),
            "samples": (epoch + 1) * self.axis.samples - sum(skipped.values()),
            **({"skipped": skipped[epoch]} if epoch in skipped else {}),
            "train_loss": loss,
            "lr": self.engine.schedule.rates[0],
            "train_seconds": seconds,
            "samples_per_s": samples / max(seconds - before, 1e-9),
        }
        if self.epoch_metrics is not None:
            entry |= self.epoch_metrics(epoch)
        if dropped := self.engine.dropped.take_unreported():
            entry["dropped"] = dropped  # samples of all ranks
        assert self.synchronizer is not None, "an epoch ends after round 0"
        self._report_notes(self.synchronizer)
        evaluation = self.task.evaluation
        if evaluation is not None and self.config.evaluates(epoch, evaluation.every):
            self.recorder.enter("evaluation")
            self.synchronizer.average_buffers()
            entry |= self._evaluate(evaluation, self.synchronizer.ratio())
        self.history.append(entry)
        if self.config.checkpoints(epoch):
            self._save_checkpoint(epoch)
        self.recorder.enter("other")
        self.recorder.event("epoch", **entry)
        self.report.epoch_done(entry)

    def _save_checkpoint(self, epoch: int) -> None:
        assert self.synchronizer is not None, "an epoch ends after round 0"
        self.recorder.enter("checkpoint")
        self.synchronizer.average_buffers()
        is_rank_0 = self.rank_info.rank == 0
        is_sharded = self.engine.full_state is not None  # gathering shards is a collective: all ranks take part
        state = self._state() if is_rank_0 or is_sharded else None
        self._check_finite(dict(self.engine.model.named_parameters()) if state is None else state.params)
        if is_rank_0 and state is not None:
            assert self.config.out is not None, "checked with the settings: checkpoints need a folder"
            state.save(self.config.out / f"epoch-{epoch + 1}")

    def _check_finite(self, params: Mapping[str, Tensor]) -> None:
        """NotFiniteError before params are saved that an update has spoilt; on all ranks alike, which hold the same."""
        for name, param in self.engine.model.named_parameters():
            if param.requires_grad and not bool(params[name].isfinite().all()):
                raise NotFiniteError(
                    f"{name} is not finite after slot {self.engine.trained - 1} on rank {self.rank_info.rank}, though "
                    "losses and gradients were; such params are not saved: the learning rate may be too high"
                )

    def _evaluate(self, evaluation: Evaluation, ratio: tuple[int, ...]) -> dict[str, float]:
        batch_size = evaluation.batch_size or self.config.batch_size
        if self._test_feed is None:
            self._test_feed = make_feed(
                evaluation.dataset,
                self.engine.device,
                self.config.seed,
                batch_size,
                evaluation.num_workers,
                is_rank=needs_ranks(self.rank_info.devices),
                loading=evaluation.loading,
            )
        model, precision = self.engine.model, self.engine.eager.precision
        if self.config.is_model_parallel:
            return evaluate(model, evaluation.eval_step, self._test_feed, precision, self.group)
        # Split by speed, as in training; at least one sample for each rank, so that all know the metrics' names.
        shares = Fixed(tuple(max(1.0, float(share)) for share in ratio)).shares(0, len(evaluation.dataset))
        first = sum(shares[: self.rank_info.rank])
        own = (first, first + shares[self.rank_info.rank])
        # FSDP's forward is a collective: all ranks run equally many batches.
        batches = -(-max(shares) // batch_size) if self.config.strategy == "fsdp" else 0
        return evaluate(model, evaluation.eval_step, self._test_feed, precision, self.group, own, self.stop, batches)

    def _state(self) -> TrainedState:
        trained = self.engine.trained
        return TrainedState(
            **self._tensors(),
            history=list(self.history),
            config=self.config.to_json(),
            slot=trained,
            samples=self.engine.samples_before(trained) - self.engine.dropped.samples,
            skipped=list(self.engine.skipped),
            dataset_samples=self.axis.samples,
            finished=trained == self.axis.total,
            structure=self.engine.structure,
        )

    def _tensors(self) -> dict[str, Any]:
        if self.engine.full_state is None:
            return capture_state(self.engine.model, self.engine.optimizer)
        full = self.engine.full_state()
        return join_state(self.engine.model, self.engine.optimizer, full.model, full.optimizer)
