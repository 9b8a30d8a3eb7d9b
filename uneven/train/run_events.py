"""What ranks do where all of them meet: an entry of the history, an evaluation, a checkpoint.

`reach` is called at every event of the axis, on all ranks alike: the synchronizers say when. An event that a lost rank
has interrupted is undone (`undo`) and reached again by whoever is left (train/settle.py), so nothing of it is
in the history twice.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from uneven.comm.gather import gather_rows
from uneven.comm.group import Group
from uneven.config import Evaluation
from uneven.data.feed import Feed, make_feed
from uneven.hardware.device import needs_ranks
from uneven.policy.exact import Fixed
from uneven.step.evaluation import evaluate, monitored, name_clash
from uneven.timeline.record import Recorder
from uneven.train.callbacks import Agreed, CallbackRunner, Moment
from uneven.train.engine import Engine
from uneven.train.rank_info import Report
from uneven.train.saves import Saves
from uneven.train.state import Kept
from uneven.train.synchronizer import EventCall, Inbox, Merged, Synchronizer

Mark = tuple[int, float]  # (slots, training seconds) at an entry of the history
Span = tuple[Mark, Mark]


@dataclass(frozen=True)
class _Before:
    """What an event that has begun, or a stop, would change again."""

    past: tuple[int, int, int]
    span: Span
    schedule: dict[str, Any] | None


class OwnLoop(Protocol):
    """A loop of the user's own, as far as a run asks it; each method is a collective."""

    def epoch_metrics(self, epoch: int) -> dict[str, float]:
        """What was logged in an epoch, for its entry of the history."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        ...

    def compare(self, group: Group) -> None:
        """With the ranks that are left after a loss: who is one call ahead, and what came of it."""
        ...


class RunEvents:
    """Life cycle: made with the worker; `use` when the group has formed, then `follow` what synchronizers report."""

    def __init__(
        self,
        engine: Engine,
        saves: Saves,
        callbacks: CallbackRunner,
        inbox: Inbox,
        report: Report,
    ) -> None:
        self._engine = engine
        self._saves = saves
        self._callbacks = callbacks
        self._inbox = inbox
        self._report = report
        self._evaluator = Evaluator(engine, inbox.requests.stop)
        self._reported_notes = 0  # of the synchronizer
        self.synchronizer: Synchronizer | None = None
        self.own_loop: OwnLoop | None = None  # where the user's own code trains
        # The history's last entry: (slots, training seconds) before and after it.
        self.span: Span = ((0, 0.0), (engine.state.trained, engine.state.train_seconds))
        self.done = engine.state.trained  # all events up to this slot are over
        self._before: _Before | None = None  # of the event that has begun and is not over, or of the run's stop
        self.may_undo = False  # the run can go on without a rank
        self._callbacks_before: Moment | None = None  # of the event that has begun; until all know whether it counts

    def expect_losses(self) -> None:
        """From now on an event may have to be reached again."""
        self.may_undo = True

    def use_loop(self, loop: OwnLoop) -> None:
        """The user's own code trains."""
        self.own_loop = loop

    def use(self, synchronizer: Synchronizer) -> Synchronizer:
        """From now on it keeps this rank in step."""
        self.synchronizer = synchronizer
        self._reported_notes = 0
        self.report_notes()
        return synchronizer

    def report_notes(self) -> None:
        """Print the lines that have come up since the last call."""
        notes = [] if self.synchronizer is None else self.synchronizer.notes
        if len(notes) > self._reported_notes:
            self._report.say(notes[self._reported_notes :])
            self._reported_notes = len(notes)
        if lines := self._saves.take_notes():
            self._report.say(lines)

    def follow(self, happened: Merged | EventCall) -> bool:
        """What ranks do where a round was merged, or all of them meet; returns whether callbacks stop the run."""
        if isinstance(happened, Merged):
            self._callbacks.run("on_round", happened.slot, self._engine.state.history)
            return False
        return self.reach(happened)

    def close(self) -> None:
        """End the loader processes of the test set."""
        self._evaluator.close()

    @property
    def _recorder(self) -> Recorder:
        return self._engine.recorder

    def agree(self) -> Agreed:
        """Exchange what callbacks asked for, where all ranks come; raises on all ranks where one has failed."""
        return self._callbacks.agree(self._engine.rank_info.group)

    def reach(self, call: EventCall) -> bool:
        """All ranks have passed this epoch, or an event in it, and where it is evaluated or saved they hold the same
        params. Adds an entry to the history, unless it is only saved inside an epoch; returns whether callbacks have
        stopped the run.
        """
        self._keep_before()
        self._callbacks_before = self._callbacks.moment() if self.may_undo else None
        is_stopped = self._reach(call)
        self._before = self._callbacks_before = None
        self.done = max(self.done, self._slot_of(call))
        return is_stopped

    def _slot_of(self, call: EventCall) -> int:
        return self._engine.axis.epoch_end(call.epoch) if call.step is None else call.step

    def _keep_before(self) -> None:
        schedule = self._engine.schedule
        kept = schedule.state_dict(first_needed=0) if schedule.needs_metric else None
        self._before = _Before(self._engine.state.mark(), self.span, kept)

    def undo(self) -> None:
        """Forget what an event that was not reached by all ranks has changed here, or a stop after which it goes on.

        Callbacks follow in `settle_callbacks`.
        """
        if self._before is not None:
            self._engine.state.forget_after(self._before.past)
            self.span = self._before.span
            if self._before.schedule is not None:
                self._engine.schedule.load_state_dict(self._before.schedule)
            self._before = None

    def settle_callbacks(self, *, counts: bool) -> None:
        """Of an event that has begun here and was interrupted. It `counts` where the furthest rank has finished it.

        Ranks agree after an event's hooks, so this rank's were called then. Else the event is reached again, and its
        hooks are called again, by callbacks that have not seen it.
        """
        before, self._callbacks_before = self._callbacks_before, None
        if counts:
            self._callbacks.forget_keep()  # the tensors come from the furthest rank, in `take_over`
        elif before is not None:
            self._callbacks.go_back_to(before)

    def record(self) -> dict[str, Any]:
        """What the furthest rank tells of the events that are over beside its RunState, for `take_over`; as JSON."""
        before = self._callbacks_before
        return {
            "schedule": self._engine.schedule.state_dict(first_needed=0),
            # One that has begun here is reached again, with the newcomers.
            "callbacks": self._callbacks.state_dict(is_needed=False) if before is None else before.states,
            "metrics": dict(self._callbacks.metrics),
            "has_kept": self._engine.state.kept is not None,
        }

    def take_over(self, shared: Mapping[str, Any], kept: Kept | None, done: int, *, is_newcomer: bool) -> None:
        """All events up to slot `done` are over on the furthest rank: go on with what it has `shared` and kept.

        A newcomer's callbacks go on from that rank's: else the first evaluation would be the best one to them.
        """
        self._engine.state.take_past(shared, kept)
        self._engine.schedule.load_state_dict(shared["schedule"])
        if is_newcomer:
            self._callbacks.load_state_dict(shared["callbacks"])
            self._callbacks.note_metrics(shared["metrics"])
        self.done = done

    def go_back(self, callbacks: Sequence[Mapping[str, Any]]) -> None:
        """The engine is where a checkpoint was taken, and what came after it has not happened (settler.py)."""
        self._before = self._callbacks_before = None
        self.done = self._engine.state.trained
        self.span = ((0, 0.0), (self._engine.state.trained, self._saves.train_seconds))
        self._callbacks.load_state_dict(callbacks)
        self._callbacks.forget_requests()

    def _reach(self, call: EventCall) -> bool:
        assert self.synchronizer is not None, "an epoch ends after round 0"
        self._recorder.enter("other")
        slot = self._slot_of(call)
        if not self._engine.events.has_entry(slot):
            return self._save_checkpoint(slot)
        if call.epoch == call.first:
            self.span = (self.span[1], (call.until, self._saves.train_seconds))
        before, (_, now_s) = self.span
        entry = _make_entry(self._engine, call, before, now_s)
        if self.own_loop is not None and call.step is None:
            entry |= self.own_loop.epoch_metrics(call.epoch)
        self.report_notes()
        evaluation = self._engine.task.evaluation
        metrics: dict[str, float] = {}
        if evaluation is not None and self._engine.events.evaluates(slot):
            self._recorder.enter("evaluation")
            self.synchronizer.average_buffers()
            metrics = self._evaluator.run(evaluation, self.synchronizer.ratio())
            self._inbox.evaluated()
            if clash := entry.keys() & metrics.keys():
                raise name_clash(clash)
            entry |= metrics
        self._engine.state.add_entry(entry)
        is_stopped = self._after_evaluation(entry, metrics) if metrics else False
        is_stopped |= self._save_checkpoint(slot)
        self._recorder.enter("other")
        self._recorder.event("epoch" if call.step is None else "evaluated", **entry)
        self._report.epoch_done(entry)
        return is_stopped

    def _after_evaluation(self, entry: dict[str, Any], metrics: dict[str, float]) -> bool:
        """What follows from the metrics, which are the same on all ranks; returns whether the run stops here."""
        if self._engine.schedule.needs_metric or self._engine.config.keep_best is not None:
            self._engine.state.follow_metric(monitored(metrics, self._engine.config.monitor))
        if self._engine.schedule.needs_metric:
            self._engine.schedule.step_metric(metrics[str(self._engine.state.monitored)])
        self._callbacks.note_metrics({**metrics, "train_loss": entry["train_loss"]})
        self._callbacks.run("on_eval", entry["step"], self._engine.state.history)
        agreed = self.agree()
        if agreed.keeps:
            self._recorder.enter("checkpoint")
            self._engine.state.keep(self._saves.tensors(), entry)
        self._callbacks.forget_keep()
        return agreed.stopped is not None

    def _save_checkpoint(self, slot: int) -> bool:
        """Take a checkpoint where one is due, on all ranks; returns whether a callback stops the run here."""
        assert self.synchronizer is not None, "an epoch ends after round 0"
        if not self._engine.events.saves(slot):
            return False
        trained = self._engine.state.trained
        assert trained == slot, f"{trained} slots are trained where slot {slot} is saved"
        self._recorder.enter("checkpoint")
        self.synchronizer.average_buffers()
        self._engine.state.note_save(slot)
        if self._saves.out is None or not self._saves.can_save():
            return False  # a replay without a folder: only what a checkpoint changes is repeated
        folder = self._saves.out / self._saves.name_at(slot)
        self._save(folder, "request" if self._inbox.requests.save.is_set() else "interval")
        if not self._callbacks.awaits_saves:
            return False
        self._saves.finish()
        self._engine.rank_info.group.all_reduce(torch.zeros(1)).wait()  # rank 0 has renamed the folder
        self._callbacks.run("on_save", slot, self._engine.state.history, folder)
        return self.agree().stopped is not None

    def _save(self, folder: Path, cause: str) -> None:
        assert self.synchronizer is not None, "an epoch ends after round 0"
        loop = None if self.own_loop is None else self.own_loop.state_dict()
        state = {"synchronizer": self.synchronizer.state_dict(), "loop": loop}
        ledger = self.synchronizer.ledger()
        self._saves.save(folder, cause, ledger, state, self._callbacks.state_dict(), self._callbacks.stopped)
        self._inbox.saved()

    def save_end_of_loop(self) -> None:
        """After the last epoch of the user's own loop, on all ranks: its checkpoint once more, where values are
        registered. The one before was taken inside the last step, and the code after that epoch may have changed them.
        """
        slot, out = self._engine.state.trained, self._saves.out
        is_saved = slot == self._engine.axis.total and self._engine.events.saves(slot) and self._saves.why_not is None
        if out is None or not is_saved:
            return
        rows = gather_rows(self._engine.rank_info.group, (float(bool(self._engine.state.user)),))
        if any(row[0] for row in rows):  # a script may register on one rank alone
            self._recorder.enter("checkpoint")
            self._save(out / self._saves.name_at(slot), "interval")

    def save_stopped(self) -> None:
        """Where the run was asked to stop, on all ranks: a checkpoint to go on from, with a local policy's gaps."""
        assert self.synchronizer is not None, "a run stops after round 0"
        self._recorder.enter("checkpoint")
        ledger = self.synchronizer.ledger()
        if ledger.trained in (0, self._engine.axis.total):
            return
        self._engine.state.reach_slot(ledger.trained)
        self._keep_before()  # until the run is over: one that loses a rank before goes on, and stops at another slot
        if self._engine.rank_info.world_size > 1 and self._engine.config.is_local:
            self._engine.state.note_stop_round()
        else:
            self._engine.state.note_save(ledger.trained)
        if (folder := self._saves.folder_when_stopped()) is not None:
            self._save(folder / f"step-{ledger.trained}", "stop")


def _make_entry(engine: Engine, call: EventCall, before: Mark, now_s: float) -> dict[str, Any]:
    """The entry of an epoch, or at a slot in it; its speed is that since the entry `before`.

    Where loss and speed are known only over several epochs, from `first` to that of slot `until`, it says so in
    "epochs".
    """
    epoch, loss, first, until, step = call
    axis, (slots, seconds) = engine.axis, before
    slot, last = axis.epoch_end(epoch) if step is None else step, axis.slot(until - 1).epoch
    skipped = {} if step is not None else dict(engine.state.skipped)
    samples = axis.samples_before(until) - axis.samples_before(slots) - skipped.get(epoch, 0)
    return {
        "epoch": epoch + 1,
        "step": slot,
        **({} if step is None else {"is_inside_epoch": True}),
        **({"epochs": [first + 1, last + 1]} if last > first else {}),
        "samples": engine.state.samples_before(slot),
        **({"skipped": skipped[epoch]} if epoch in skipped else {}),
        "train_loss": loss,
        "lr": engine.schedule.first_rate,
        "train_seconds": now_s,
        "samples_per_s": samples / max(now_s - seconds, 1e-9),
    }


class Evaluator:
    """The evaluation of one rank: its part of the test set, split by speed as training is.

    The feed of the test set is kept from one evaluation to the next.
    """

    def __init__(self, engine: Engine, stop: threading.Event) -> None:
        self._engine = engine
        self._config = engine.config
        self._stop = stop
        self._feed: Feed | None = None

    def run(self, evaluation: Evaluation, ratio: tuple[int, ...]) -> dict[str, float]:
        """Metrics over the whole test set, the same on all ranks; a collective. `ratio`: of the ranks' speeds."""
        engine, info = self._engine, self._engine.rank_info
        batch_size = evaluation.batch_size or self._config.batch_size
        if self._feed is None:
            self._feed = make_feed(
                evaluation.dataset,
                engine.device,
                self._config.seed,
                batch_size,
                evaluation.num_workers,
                is_rank=needs_ranks(info.devices),
                loading=evaluation.loading,
            )
        model, precision = engine.model, engine.step.precision
        if self._config.is_model_parallel:
            return evaluate(model, evaluation.eval_step, self._feed, precision, info.group)
        # Split by speed, as in training; a rank may have no samples.
        shares = Fixed(tuple(max(1.0, float(share)) for share in ratio)).shares(0, len(evaluation.dataset))
        first = sum(shares[: info.rank])
        own = (first, first + shares[info.rank])
        # FSDP's forward is a collective: all ranks run equally many batches.
        batches = -(-max(shares) // batch_size) if self._config.strategy == "fsdp" else 0
        return evaluate(model, evaluation.eval_step, self._feed, precision, info.group, own, self._stop, batches)

    def close(self) -> None:
        """End the loader processes that the feed kept."""
        self._feed = None
