"""One rank's training loop: batch -> step -> policy -> gradient sum or average.

`Worker.train` reads from top to bottom. The engine is the rank by itself, the synchronizer keeps it in step with the
others: GradientSync by a sum of gradients in every step, LocalSGD by averages of params in rounds. At every moment
the recorder is in exactly one state, so the timeline accounts for all of the rank's time.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from uneven.comm.collectives import broadcast_params
from uneven.comm.gather import gather_rows
from uneven.comm.group import Group
from uneven.config import Evaluation, RunConfig, Task, read_every
from uneven.data.feed import Feed, Micros, make_feed
from uneven.errors import NotFiniteError
from uneven.hardware.device import needs_ranks
from uneven.policy.axis import Axis, Part
from uneven.policy.exact import Fixed
from uneven.policy.finish import Cost
from uneven.results.state import TrainedState, capture_state, join_state
from uneven.step.eager import EagerStep
from uneven.step.evaluation import evaluate, monitored
from uneven.step.precision import device_flags
from uneven.timeline.record import Recorder
from uneven.timeline.sample import Sampler
from uneven.timeline.timeline import Timeline
from uneven.train.apply_strategy import choose_activations
from uneven.train.callbacks import Agreed, CallbackRunner
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
        save_requested: threading.Event | None = None,
    ) -> None:
        # Set from any thread, cleared here when the wish has been taken up.
        self.save_requested = threading.Event() if save_requested is None else save_requested
        self.task, self.config, self.rank_info = task, config, rank_info
        self.join, self.stop, self.report = join, stop, report
        self.recorder = Recorder(rank_info.rank)
        self.engine = Engine(task, config, rank_info, self.recorder, is_own_loop=is_own_loop)
        self.callbacks = CallbackRunner(task.callbacks, self.engine)
        self.history: list[dict[str, Any]] = []
        self._span = ((0, 0.0), (0, 0.0))  # the history's last entry: (slots, training seconds) before and after it
        self._kept: tuple[dict[str, Any], dict[str, Any]] | None = None  # tensors a callback kept, and their entry
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
            if not self.start_callbacks():
                self._train_slots(synchronizer)
            synchronizer.finalize()
            self._report_notes(synchronizer)
            self.end_callbacks()
        return self.result()

    def _train_slots(self, synchronizer: Synchronizer) -> None:
        synchronizer.reset_timer()
        for part, micros in self.engine.feed.stream(synchronizer.parts()):
            if self.train_part(synchronizer, part, micros):
                break
            self.recorder.enter("data")

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
            if self.engine.reader is not None:
                self.engine.reader.close()

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
        engine.connect_reader(info.group)
        is_local = self.config.is_local and info.world_size > 1
        kind: type[LocalSGD] | type[GradientSync] = LocalSGD if is_local else GradientSync
        synchronizer: Synchronizer = kind(engine, self._is_stopping, self._end_epoch)
        if self.callbacks.is_any:
            synchronizer.after_step = lambda slot: self._call_back("on_step", slot)
            synchronizer.after_round = lambda slot: self._call_back("on_round", slot)
        self.recorder.enter("communication")
        broadcast_params(info.group, (*engine.model.parameters(), *engine.model.buffers()))
        rows = gather_rows(info.group, (cost.fixed_ms, cost.sample_ms, cost.cap, float(self.callbacks.is_any)))
        self.callbacks.is_active = any(row[3] for row in rows)  # a script may pass callbacks on rank 0 alone
        synchronizer.initialize([Cost(*row[:3]) for row in rows])
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
        state, dropped = self._result_state(), list(engine.dropped.parts)
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

    def start_callbacks(self) -> bool:
        """on_start; returns whether a callback has stopped the run already."""
        self._call_back("on_start", 0)
        return self._agree().stopped is not None

    def end_callbacks(self) -> None:
        """After the last step on every rank: the reason of a stop is known to all, then on_end."""
        self._agree()
        self._call_back("on_end", self.engine.trained)
        self._agree()

    def _call_back(self, hook: str, step: int, path: Path | None = None) -> int:
        """Run this hook of the callbacks; returns the ns that they took."""
        return self.callbacks.run(hook, step, self.history, path)

    def _agree(self) -> Agreed:
        """Exchange what callbacks asked for, where all ranks come; raises on all ranks where one has failed."""
        return self.callbacks.agree(self.group)

    @property
    def stopped(self) -> str | None:
        """Why the run ends early, where callbacks asked for it and all ranks know."""
        return self.callbacks.stopped

    def _is_stopping(self) -> bool:
        return self.stop.is_set() or self.callbacks.is_stopping()

    def _end_epoch(self, epoch: int, loss: float, *, first: int, until: int, step: int | None = None) -> bool:
        """All ranks have passed this epoch, or an event at slot `step` in it, and where it is evaluated or saved they
        hold the same params. Adds an entry to the history; returns whether callbacks have stopped the run.

        Where loss and speed are known only over several epochs, from `first` to that of `until`, the entry says so in
        "epochs".
        """
        assert self.synchronizer is not None, "an epoch ends after round 0"
        self.recorder.enter("other")
        slot, last = self.axis.epoch_end(epoch) if step is None else step, self.axis.slot(until - 1).epoch
        if epoch == first:
            self._span = (self._span[1], (until, self.recorder.account().training_s))
        (slots, seconds), (_, now_s) = self._span
        skipped = {} if step is not None else dict(self.engine.skipped)
        samples = self.axis.samples_before(until) - self.axis.samples_before(slots) - skipped.get(epoch, 0)
        entry = {
            "epoch": epoch + 1,
            "step": slot,
            **({} if step is None else {"is_inside_epoch": True}),
            **({"epochs": [first + 1, last + 1]} if last > first else {}),
            "samples": self.engine.samples_before(slot),
            **({"skipped": skipped[epoch]} if epoch in skipped else {}),
            "train_loss": loss,
            "lr": self.engine.schedule.rates[0],
            "train_seconds": now_s,
            "samples_per_s": samples / max(now_s - seconds, 1e-9),
        }
        if self.epoch_metrics is not None and step is None:
            entry |= self.epoch_metrics(epoch)
        if dropped := self.engine.dropped.take_unreported():
            entry["dropped"] = dropped  # samples of all ranks
        self._report_notes(self.synchronizer)
        evaluation = self.task.evaluation
        metrics: dict[str, float] = {}
        if evaluation is not None and self.engine.events.evaluates(slot):
            self.recorder.enter("evaluation")
            self.synchronizer.average_buffers()
            metrics = self._evaluate(evaluation, self.synchronizer.ratio())
            entry |= metrics
        self.history.append(entry)
        is_stopped = self._after_evaluation(entry, metrics) if metrics else False
        if self.engine.events.saves(slot):
            is_stopped |= self._save_checkpoint(slot)
        self.recorder.enter("other")
        self.recorder.event("epoch" if step is None else "evaluated", **entry)
        self.report.epoch_done(entry)
        return is_stopped

    def _after_evaluation(self, entry: dict[str, Any], metrics: dict[str, float]) -> bool:
        """What follows from the metrics, which are the same on all ranks; returns whether the run stops here."""
        if self.engine.schedule.needs_metric:
            self.engine.schedule.step_metric(monitored(metrics, self.config.monitor))
        self.callbacks.metrics = {**metrics, "train_loss": entry["train_loss"]}
        self._call_back("on_eval", entry["step"])
        agreed = self._agree()
        if agreed.keeps:
            self.recorder.enter("checkpoint")
            self._kept = self._tensors(), entry
        return agreed.stopped is not None

    def _save_checkpoint(self, slot: int) -> bool:
        """Write a checkpoint, on rank 0; returns whether a callback stops the run here."""
        assert self.synchronizer is not None, "an epoch ends after round 0"
        assert self.config.out is not None, "checked with the settings: checkpoints need a folder"
        self.recorder.enter("checkpoint")
        self.synchronizer.average_buffers()
        every = read_every(self.config.save_every)
        is_in_epochs = every is not None and every.unit == "epochs"
        name = f"epoch-{self.axis.epochs_before(slot)}" if is_in_epochs else f"step-{slot}"
        is_rank_0 = self.rank_info.rank == 0
        is_sharded = self.engine.full_state is not None  # gathering shards is a collective: all ranks take part
        state = self._state(self._tensors()) if is_rank_0 or is_sharded else None
        self._check_finite(dict(self.engine.model.named_parameters()) if state is None else state.params)
        if is_rank_0 and state is not None:
            state.save(self.config.out / name)
        self._call_back("on_save", slot, self.config.out / name)
        return self._agree().stopped is not None

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
        # Split by speed, as in training; a rank may have no samples.
        shares = Fixed(tuple(max(1.0, float(share)) for share in ratio)).shares(0, len(evaluation.dataset))
        first = sum(shares[: self.rank_info.rank])
        own = (first, first + shares[self.rank_info.rank])
        # FSDP's forward is a collective: all ranks run equally many batches.
        batches = -(-max(shares) // batch_size) if self.config.strategy == "fsdp" else 0
        return evaluate(model, evaluation.eval_step, self._test_feed, precision, self.group, own, self.stop, batches)

    def _result_state(self) -> TrainedState:
        """What the run returns: its last tensors, or those that a callback has kept."""
        if self._kept is None:
            return self._state(self._tensors())
        tensors, entry = self._kept
        return self._state(tensors, entry)

    def _state(self, tensors: dict[str, Any], best: dict[str, Any] | None = None) -> TrainedState:
        trained = self.engine.trained
        is_finished = trained == self.axis.total
        return TrainedState(
            **tensors,
            history=list(self.history),
            config=self.config.to_json(),
            slot=trained,
            samples=self.engine.samples_before(trained) - self.engine.dropped.samples,
            skipped=list(self.engine.skipped),
            dataset_samples=self.axis.epoch_samples,
            finished=is_finished,
            stopped=None if is_finished else self.stopped,
            best=best,
            structure=self.engine.structure,
        )

    def _tensors(self) -> dict[str, Any]:
        if self.engine.full_state is None:
            return capture_state(self.engine.model, self.engine.optimizer)
        full = self.engine.full_state()
        return join_state(self.engine.model, self.engine.optimizer, full.model, full.optimizer)
