"""One rank's training loop: batch -> step -> policy -> gradient sum or average.

`Worker.train` reads from top to bottom. The engine is the rank by itself, the synchronizer keeps it in step with the
others: GradientSync by a sum of gradients in every step, LocalSGD by averages of params in rounds. At every moment
the recorder is in exactly one state, so the timeline accounts for all of the rank's time.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from uneven.comm.collectives import broadcast_params
from uneven.comm.gather import gather_rows
from uneven.comm.group import Group
from uneven.config import RunConfig, Task, read_every
from uneven.data.feed import Micros
from uneven.errors import NotFiniteError
from uneven.policy.axis import Axis, Part
from uneven.policy.finish import Cost
from uneven.step.eager import EagerStep
from uneven.step.evaluation import monitored, name_clash
from uneven.step.precision import device_flags
from uneven.timeline.record import Recorder
from uneven.timeline.sample import Sampler
from uneven.timeline.timeline import Timeline
from uneven.train.apply_strategy import choose_activations
from uneven.train.callbacks import Agreed, CallbackRunner
from uneven.train.engine import Engine
from uneven.train.evaluator import Evaluator
from uneven.train.global_batch import settle_global_batch
from uneven.train.gradient_sync import GradientSync
from uneven.train.history import make_entry
from uneven.train.local_sgd import LocalSGD
from uneven.train.membership import Membership
from uneven.train.rank_info import RankInfo, RankResult, Report
from uneven.train.resume import Resumed
from uneven.train.run_record import RunRecord
from uneven.train.saves import Saves
from uneven.train.synchronizer import Synchronizer, Wish
from uneven.train.wishes import Wishes

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
        self.save_requested = save_requested or threading.Event()  # set from any thread, cleared when it is taken up
        self.task, self.config, self.rank_info = task, config, rank_info
        self.join, self.stop, self.report = join, stop, report
        self.recorder = Recorder(rank_info.rank)
        self.engine = Engine(task, config, rank_info, self.recorder, is_own_loop=is_own_loop)
        self.callbacks = CallbackRunner(task.callbacks, self.engine)
        self.run = RunRecord()
        self.resumed: Resumed | None = None
        self.saves = Saves(self.engine, self.run)
        self.wishes = Wishes(
            read_every(config.save_every), self.engine.events.evaluation, self.save_requested, rank_info.rank == 0
        )
        self._evaluator = Evaluator(self.engine, config, stop)
        self._resume()
        # The history's last entry: (slots, training seconds) before and after it.
        self._span = ((0, 0.0), (self.engine.trained, self.run.train_seconds))
        self.membership: Membership | None = None  # where the run can go on without a rank that is lost
        self.synchronizer: Synchronizer | None = None
        self.epoch_metrics: Callable[[int], dict[str, float]] | None = None  # of the user's loop; a collective
        self.loop_state: Callable[[], dict[str, Any] | None] = lambda: None  # likewise, for checkpoints
        self._reported_notes = 0
        self._reported_s = 0.0
        self._sampler = Sampler()

    @property
    def history(self) -> list[dict[str, Any]]:
        return self.run.history

    def _resume(self) -> None:
        """Go on from a checkpoint, where one was named; before anything is compiled or measured."""
        if self.config.resume is None:
            devices = [str(device) for device in self.rank_info.devices]
            self.run.segments.append({"slot": 0, "samples": 0, "devices": devices})
            return
        self.resumed = Resumed(self.config.resume, self.rank_info)
        self.resumed.restore_record(self.run)
        self.resumed.restore_engine(self.engine)

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
            is_stopped = self.start_callbacks()
            if not is_stopped:
                is_stopped = self._train_slots(synchronizer)
            self.end(synchronizer, is_stopped)
        return self.result()

    def end(self, synchronizer: Synchronizer, is_stopped: bool) -> None:
        """After the last slot, or a stop: all replicas are equal, what was stopped is saved, on_end is called."""
        synchronizer.finalize()
        if is_stopped and self._agree().stopped is None:
            self.save_stopped()
        self.recorder.enter("setup")  # nothing is left to train: the last checkpoint holds nobody up
        self.saves.finish()
        self._report_notes(synchronizer)
        self.end_callbacks()

    def _train_slots(self, synchronizer: Synchronizer) -> bool:
        """Train the rest of the axis; returns whether the run was stopped before its end."""
        synchronizer.reset_timer()
        self.wishes.start(self.recorder.clock())
        for part, micros in self.engine.feed.stream(synchronizer.parts()):
            if self.train_part(synchronizer, part, micros):
                return True
            self.recorder.enter("data")
        return False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """All of the rank's work lies inside; `result` may be called afterwards."""
        self._sampler.start()
        try:
            with device_flags(self.engine.device):
                yield
        except BaseException:
            if self.synchronizer is not None:
                self.synchronizer.close()  # its threads
            raise
        finally:
            self.recorder.close()
            self._sampler.stop()
            self._evaluator.close()
            self.saves.close()
            if self.engine.captured is not None:
                self.engine.captured.leave_whole()
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
        self.recorder.event("ready")  # from here on this rank waits for the slowest one
        info.join(self.join(engine.model))
        info.compare_clocks(self.recorder.clock)
        engine.connect_reader(info.group)
        is_local = self.config.is_local and info.world_size > 1
        kind: type[LocalSGD] | type[GradientSync] = LocalSGD if is_local else GradientSync
        synchronizer: Synchronizer = kind(engine, self._is_stopping, self._end_epoch)
        if self.callbacks.is_any:
            synchronizer.after_step = lambda slot: self._call_back("on_step", slot)
            synchronizer.after_round = lambda slot: self._call_back("on_round", slot)
        self.recorder.enter("communication")
        broadcast_params(info.group, (*engine.model.parameters(), *engine.model.buffers()))
        hooks = (float(self.callbacks.is_any), float(self.callbacks.has("on_save")))
        rows = gather_rows(info.group, (cost.fixed_ms, cost.sample_ms, cost.cap, *hooks))
        self.callbacks.is_active = any(row[3] for row in rows)  # a script may pass callbacks on rank 0 alone
        self.callbacks.awaits_saves = any(row[4] for row in rows)
        costs = [Cost(*row[:3]) for row in rows]
        lines = settle_global_batch(engine, costs)
        self.config = engine.config
        synchronizer.initialize(costs)
        synchronizer.notes[:0] = lines
        if info.rank > 0 and not self.config.is_model_parallel:
            torch.manual_seed(self.config.seed + 7919 * info.rank)  # each rank draws its own dropout masks
        if self.resumed is not None:
            self._resume_rest(self.resumed, synchronizer)
        self.saves.connect()
        synchronizer.wish, synchronizer.before_change = self._wish, self.saves.wait_taken
        self.synchronizer = synchronizer
        self._report_notes(synchronizer)
        self.recorder.enter("setup")
        return synchronizer

    def _resume_rest(self, resumed: Resumed, synchronizer: Synchronizer) -> None:
        """What needs the group: sharded state, and the policy's own where the devices are the same."""
        resumed.restore_rest(self.engine)
        if resumed.is_same_group:
            synchronizer.load_state_dict(resumed.record["synchronizer"])
        if lines := self.callbacks.load_state_dict(resumed.own.record["callbacks"]):
            self.report.say(lines)

    def _wish(self) -> Wish:
        """What this rank wants beside what the axis asks for; a replay follows its log alone."""
        return Wish.NONE if self.config.replay is not None else self.wishes.ask(self.recorder.clock())

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
        engine, info = self.engine, self.rank_info
        if engine.device.type == "cuda":
            self.recorder.event("memory", peak_bytes=torch.cuda.max_memory_allocated(engine.device))
        if info.world_size > 1:
            self.recorder.event("traffic", steps=len(engine.log), **asdict(self.group.traffic))
        info.compare_clocks(self.recorder.clock)
        busy = engine.run_ahead.busy
        timeline = Timeline.of(self.recorder, str(info.device), self._sampler.samples, busy, info.machine)
        state, dropped = self.saves.result(self.stopped), list(engine.dropped.parts)
        return RankResult(state, timeline, engine.log, list(engine.rounds), self.group.traffic, dropped, self.run)

    def show(self) -> dict[str, Any]:
        """Where the rank is; called from the heartbeat's thread at any moment."""
        rounds = self.synchronizer.progress() if self.synchronizer is not None else {}
        where = {"slot": self.engine.trained, "phase": self.recorder.state, "rounds": rounds}
        return {**where, **self.rank_info.place, "deadline": self.config.deadline}

    def _report_notes(self, synchronizer: Synchronizer) -> None:
        if len(synchronizer.notes) > self._reported_notes:
            self.report.say(synchronizer.notes[self._reported_notes :])
            self._reported_notes = len(synchronizer.notes)
        if lines := self.saves.take_notes():
            self.report.say(lines)

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
        hold the same params. Adds an entry to the history, unless it is only saved inside an epoch; returns whether
        callbacks have stopped the run.
        """
        assert self.synchronizer is not None, "an epoch ends after round 0"
        self.recorder.enter("other")
        slot = self.axis.epoch_end(epoch) if step is None else step
        if not self.engine.events.has_entry(slot):
            return self._save_checkpoint(slot)
        if epoch == first:
            self._span = (self._span[1], (until, self.saves.train_seconds))
        before, (_, now_s) = self._span
        entry = make_entry(self.engine, before, now_s, loss, epoch=epoch, first=first, until=until, step=step)
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
            metrics = self._evaluator.run(evaluation, self.synchronizer.ratio())
            self.wishes.evaluated(self.recorder.clock())
            if clash := entry.keys() & metrics.keys():
                raise name_clash(clash)
            entry |= metrics
        self.history.append(entry)
        is_stopped = self._after_evaluation(entry, metrics) if metrics else False
        is_stopped |= self._save_checkpoint(slot)
        self.recorder.enter("other")
        self.recorder.event("epoch" if step is None else "evaluated", **entry)
        self.report.epoch_done(entry)
        return is_stopped

    def _after_evaluation(self, entry: dict[str, Any], metrics: dict[str, float]) -> bool:
        """What follows from the metrics, which are the same on all ranks; returns whether the run stops here."""
        if self.engine.schedule.needs_metric or self.config.keep_best is not None:
            self.run.monitored = monitored(metrics, self.config.monitor)
        if self.engine.schedule.needs_metric:
            self.engine.schedule.step_metric(metrics[str(self.run.monitored)])
        self.callbacks.metrics = {**metrics, "train_loss": entry["train_loss"]}
        self._call_back("on_eval", entry["step"])
        agreed = self._agree()
        if agreed.keeps:
            self.recorder.enter("checkpoint")
            self.run.kept = self.saves.tensors(), entry
        return agreed.stopped is not None

    def _save_checkpoint(self, slot: int) -> bool:
        """Take a checkpoint where one is due, on all ranks; returns whether a callback stops the run here."""
        assert self.synchronizer is not None, "an epoch ends after round 0"
        if not self.engine.events.saves(slot):
            return False
        assert self.engine.trained == slot, f"{self.engine.trained} slots are trained where slot {slot} is saved"
        self.recorder.enter("checkpoint")
        self.synchronizer.average_buffers()
        self.run.saves.append(slot)
        if self.saves.out is None or not self.saves.can_save():
            return False  # a replay without a folder: only what a checkpoint changes is repeated
        folder = self.saves.out / self.saves.name_at(slot)
        self._save(folder, "request" if self.wishes.requested.is_set() else "interval")
        if not self.callbacks.awaits_saves:
            return False
        self.saves.finish()
        self.group.all_reduce(torch.zeros(1)).wait()  # rank 0 has renamed the folder
        self._call_back("on_save", slot, folder)
        return self._agree().stopped is not None

    def _save(self, folder: Path, cause: str) -> None:
        assert self.synchronizer is not None, "an epoch ends after round 0"
        state = {"synchronizer": self.synchronizer.state_dict(), "loop": self.loop_state()}
        ledger = self.synchronizer.ledger()
        self.saves.save(folder, cause, ledger, state, self.callbacks.state_dict(), self.stopped)
        self.wishes.saved(self.recorder.clock())

    def save_stopped(self) -> None:
        """Where the run was asked to stop, on all ranks: a checkpoint to go on from, with a local policy's gaps."""
        assert self.synchronizer is not None, "a run stops after round 0"
        self.recorder.enter("checkpoint")
        ledger = self.synchronizer.ledger()
        if ledger.trained in (0, self.axis.total):
            return
        self.engine.reach_slot(ledger.trained)
        if self.rank_info.world_size > 1 and self.config.is_local:
            self.run.stop_rounds.append(len(self.engine.rounds) - 1)
        else:
            self.run.saves.append(ledger.trained)
        if (folder := self.saves.folder_when_stopped()) is not None:
            self._save(folder / f"step-{ledger.trained}", "stop")
