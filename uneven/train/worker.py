"""One rank's training loop: batch -> step -> policy -> gradient sum or average.

`Worker.train` reads from top to bottom. The engine is the rank by itself, the synchronizer keeps it in step with the
others: GradientSync by sums of gradients, LocalSGD by averages of params. The recorder is always in exactly one state.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

import torch
from torch import nn

from uneven.comm.gather import gather_json, gather_rows
from uneven.comm.group import Group
from uneven.config import RunConfig, Task
from uneven.data.feed import Micros
from uneven.errors import GroupLostError, NotFiniteError
from uneven.policy.axis import Axis, Part
from uneven.policy.finish import Cost
from uneven.step.eager import EagerStep
from uneven.step.precision import device_flags
from uneven.timeline.record import Recorder
from uneven.timeline.sample import Sampler
from uneven.timeline.timeline import Timeline
from uneven.train.callbacks import CallbackRunner
from uneven.train.engine import Engine, describe_schedule, seed_random
from uneven.train.gradient_sync import GradientSync
from uneven.train.local_sgd import LocalSGD
from uneven.train.policies import choose_global_batch
from uneven.train.prepare import check_loss, choose_activations, find_cap, measure, send_model, warm_up
from uneven.train.rank_info import Membership, RankInfo, RankResult, Report
from uneven.train.requests import Requests
from uneven.train.run_events import RunEvents
from uneven.train.saved_state import Resumed
from uneven.train.saves import Saves, Survival
from uneven.train.settle import why_not as why_not_settled
from uneven.train.settler import Settler, why_nobody_goes
from uneven.train.synchronizer import EventCall, Inbox, Synchronizer

REPORT_EVERY_S = 0.1  # more often than a person can read; a report costs a few microseconds
UNMEASURED = Cost(0.0, 1.0)

T = TypeVar("T")


class Worker:
    """Life cycle: made on the thread that trains, `train()` once. `join(model)` forms the group.

    A loop of the user's own takes the place of `train`: it calls `initialize`, `train_part` and `result`.
    """

    def __init__(
        self,
        task: Task,
        config: RunConfig,
        rank_info: RankInfo,
        join: Callable[[nn.Module], Group],
        requests: Requests,
        report: Report,
    ) -> None:
        self.task = task
        self.config = config
        self.rank_info = rank_info
        self.join = join
        self.requests = requests
        self.report = report
        self.recorder = Recorder(rank_info.rank)
        self.engine = Engine(task, config, rank_info, self.recorder)
        self.callbacks = CallbackRunner(task.callbacks, self.engine)
        self.resumed: Resumed | None = None
        self.saves = Saves(self.engine)
        evaluation = self.engine.events.evaluation
        self.inbox = Inbox(config, evaluation, requests, self.callbacks, rank_info, self.recorder.clock)
        self._resume()
        self._first = self.engine.state.trained
        self.synchronizer: Synchronizer | None = None
        self.events = RunEvents(self.engine, self.saves, self.callbacks, self.inbox, report)
        self.membership: Membership | None = None  # where a launcher announces generations of ranks
        self.settler: Settler | None = None  # where the run can go on without a rank
        self._cost = UNMEASURED  # of this rank before the first step
        self._has_ended = False  # on_end was called
        self._reported_s = 0.0
        self._sampler = Sampler()

    @property
    def history(self) -> list[dict[str, Any]]:
        return self.engine.state.history

    def _resume(self) -> None:
        """Go on from a checkpoint, where one was named; before anything is compiled or measured."""
        if self.config.resume is None or self.rank_info.is_newcomer:
            self.engine.state.begin_segment({"slot": 0, "samples": 0, **self.rank_info.segment})
            return
        self.resumed = Resumed(self.config.resume, self.rank_info)
        self.resumed.restore(self.engine)

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
            self.prepare()
            if make_step is not None:
                self.engine.use_step(make_step(self))
            else:
                self.prepare_for_losses()
            self.report.started(self.axis, self.engine.feed.place)
            self._call_back("on_start", 0)
            self.surviving(self._train_to_end)
        return self.surviving(self.result)

    def surviving(self, action: Callable[[], T], again: Callable[[], T] | None = None) -> T:
        """The result of `action`. Where a rank is lost meanwhile, settle with the others and call it again, or `again`.

        The one place that catches the loss of a group, also of one that is lost while the ranks settle.
        """
        lost: GroupLostError | None = None
        while True:
            try:
                if lost is not None:
                    assert self.settler is not None, "see below"
                    self.settler.settle(lost)
                    lost, action = None, again or action
                return action()
            except GroupLostError as error:  # noqa: PERF203, once in a generation
                if self.settler is None or not self.settler.can_go_on:
                    raise
                lost = error

    def finish(self, collect: Callable[[], T]) -> T:
        """The run's result by a collective of all ranks; a rank that has it stays until all of them do."""

        def collect_and_stay() -> T:
            found = collect()
            if self.settler is not None:
                self.settler.finish()
            return found

        return self.surviving(collect_and_stay)

    def _train_to_end(self) -> None:
        """Train from the slot that all ranks have reached; called again in every generation."""
        synchronizer = self.synchronizer
        assert synchronizer is not None, "made when the group has formed"
        if self.settler is not None and self.settler.is_over:
            return
        self._check()
        is_stopped = self.events.agree().stopped is not None or self.reach_due()
        self._check()
        if not is_stopped:
            is_stopped = self._train_slots(synchronizer)
        self._check()
        self.end(is_stopped)

    def end(self, is_stopped: bool) -> None:
        """After the last slot, or a stop: make replicas equal, save a run that was stopped, call on_end."""
        synchronizer = self.synchronizer
        assert synchronizer is not None, "made when the group has formed"
        synchronizer.finalize()
        if is_stopped and self.events.agree().stopped is None:
            self.events.save_stopped()
        self.recorder.enter("setup")  # nothing is left to train: the last checkpoint holds nobody up
        self.saves.finish()
        self.events.report_notes()
        self.end_callbacks()
        self.rank_info.compare_clocks(self.recorder.clock)
        if self.settler is not None:
            self.settler.reach_end()

    def _train_slots(self, synchronizer: Synchronizer) -> bool:
        """Train the rest of the axis; returns whether the run was stopped before its end."""
        synchronizer.reset_timer()
        self.inbox.start()
        for part, micros in self.engine.feed.stream(synchronizer.parts()):
            if self.train_part(synchronizer, part, micros):
                return True
            self._check()
            self.recorder.enter("data")
        return False

    def _check(self) -> None:
        if self.settler is not None:
            self.settler.between_steps()

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
            self.events.close()
            self.saves.close()
            if self.engine.reader is not None:
                self.engine.reader.close()

    def prepare(self) -> Synchronizer:
        """Everything before the first slot: compile, warm up and measure alone, then form the group."""
        check_loss(self.engine, may_grow=self.membership is not None)
        self.report.say(choose_activations(self.engine))
        if not self.engine.can_warm_up:
            if self.engine.reader is not None and self.config.compile == "default":
                self.engine.model.compile()  # where there is a warm-up, it does this
            return self.initialize(UNMEASURED)
        find_cap(self.engine)
        warm_up(self.engine)
        is_measured = self.rank_info.world_size > 1 and not self.config.has_fixed_shares
        return self.initialize(measure(self.engine) if is_measured else UNMEASURED)

    def initialize(self, cost: Cost) -> Synchronizer:
        """Form the group. In round 0 all ranks take rank 0's params and learn every rank's cost."""
        info, engine = self.rank_info, self.engine
        # From here on this rank waits for the slowest one, but for one that joins later: nobody waits for it.
        self.recorder.event("ready", joins=info.is_newcomer)
        self._cost = cost
        if info.is_newcomer:
            return self._join_later(cost)
        info.join(self.join(engine.model))
        if (why := info.segment.get("why")) is not None:
            slot, ranks = engine.state.trained, info.world_size
            self.recorder.event("generation", slot=slot, again=0, number=0, why=why, ranks=ranks, ms=0.0)
        synchronizer = self.new_synchronizer()
        self.recorder.enter("communication")
        info.compare_clocks(self.recorder.clock)
        engine.connect_reader(info.group)
        send_model(engine, info.group)
        self._connect(synchronizer, cost)
        if info.rank > 0 and not self.config.is_model_parallel:
            seed_random(self.config.seed + 7919 * info.rank, is_own_loop=engine.is_own_loop)  # its own dropout masks
        self.report.say(describe_schedule(engine.schedule, self.task, self.config, self.axis))
        if self.resumed is not None:
            self.report.say(self.resumed.go_on(engine, synchronizer, self.callbacks))
        self._use(synchronizer)
        self.recorder.enter("setup")
        return synchronizer

    def use_membership(self, membership: Membership) -> None:
        """A launcher announces generations of ranks; before the group forms."""
        self.membership = membership

    def expect_losses(self, survival: Survival) -> None:
        """From now on the loss of a rank may interrupt an event, or a checkpoint."""
        self.events.expect_losses()
        self.saves.expect_losses(survival)

    def new_synchronizer(self) -> Synchronizer:
        is_local = self.config.is_local and self.rank_info.world_size > 1
        kind: type[LocalSGD] | type[GradientSync] = LocalSGD if is_local else GradientSync
        return kind(self.engine, self.inbox, self.saves.wait_taken)

    def _connect(self, synchronizer: Synchronizer, cost: Cost) -> None:
        """All ranks learn every rank's cost, and the synchronizer begins with them; a collective."""
        hooks = (float(self.callbacks.is_any), float(self.callbacks.has("on_save")))
        rows = gather_rows(self.group, (cost.fixed_ms, cost.sample_ms, cost.cap, *hooks))
        # A script may pass callbacks on rank 0 alone.
        self.callbacks.connect(is_active=any(row[3] for row in rows), awaits_saves=any(row[4] for row in rows))
        costs = [Cost(fixed_ms=row[0], sample_ms=row[1], cap=row[2]) for row in rows]
        lines = choose_global_batch(self.engine, costs)
        self.config = self.engine.config
        synchronizer.initialize(costs)
        synchronizer.notes[:0] = lines

    def _use(self, synchronizer: Synchronizer) -> None:
        """Let this synchronizer keep the rank in step from now on; a collective."""
        self.saves.connect()
        self.synchronizer = self.events.use(synchronizer)

    def prepare_for_losses(self) -> None:
        """Make the settler where the run can go on in generations that a launcher announces; before the first slot."""
        if self.settler is not None or self.membership is None or why_not_settled(self.engine) is not None:
            return
        members = gather_json(self.group, self.rank_info.member)
        if self.resumed is not None and not self.config.is_local:  # there the first record of a rank has it
            self.engine.state.know_resumed(self.resumed.logs_of(members))
        self.settler = self._make_settler(self.membership, members)
        self.settler.begin()
        assert self.synchronizer is not None, "made when the group has formed"
        self.synchronizer.expect_losses()

    def _make_settler(self, membership: Membership, members: Sequence[str]) -> Settler:
        self.inbox.may_leave(membership)
        return Settler(self, membership, members)

    def _join_later(self, cost: Cost) -> Synchronizer:
        """Join a run in progress: this rank takes the position of the others, and everything that they have."""
        assert self.membership is not None, "a newcomer has one"
        self.settler = self._make_settler(self.membership, ())
        settler = self.settler
        self.surviving(lambda: settler.join(cost), lambda: None)
        settler.defer_joins()
        self.recorder.enter("setup")
        assert self.synchronizer is not None, "made when it has settled"
        return self.synchronizer

    def go_on_after(self, before: Synchronizer | None, cost: Cost | None, event_loss: float | None) -> None:
        """The ranks have settled in a new group: train on in it, with a synchronizer that takes over from `before`."""
        synchronizer = self.new_synchronizer()
        try:
            # Another type: this rank is left alone of a local policy, or joins one.
            synchronizer.go_on_after(before if type(before) is type(synchronizer) else None, event_loss)
            self.rank_info.compare_clocks(self.recorder.clock)
            self.engine.connect_reader(self.group)
            self._connect(synchronizer, cost or self._cost)
            synchronizer.expect_losses()
            self._use(synchronizer)
        except BaseException:
            synchronizer.close()
            raise

    def train_part(self, synchronizer: Synchronizer, part: Part, micros: Micros) -> bool:
        """Train the next part and report progress now and then; returns whether the run stops here."""
        try:
            if (slot := synchronizer.step(part, micros)) is not None and self.callbacks.is_any:
                synchronizer.note_user_time(self._call_back("on_step", slot))
            self.follow(synchronizer)
        except NotFiniteError:
            self.events.report_notes()  # the steps that led to it
            raise
        if synchronizer.is_stopped:
            self.recorder.event("stop", slot=self.engine.state.trained)
        now_s = self.recorder.clock() / 1e9
        if now_s - self._reported_s >= REPORT_EVERY_S:
            self._reported_s = now_s
            seconds = self.recorder.account().training_s
            samples = self.engine.state.samples_before(self.engine.state.trained)
            self.report.stepped(samples, self.engine.state.samples, seconds, self.engine.meter.glance())
            self.events.report_notes()
        return synchronizer.is_stopped

    def follow(self, synchronizer: Synchronizer) -> bool:
        """After a step: the collectives that are due, and what follows from them; returns whether the run stops."""
        while (happened := synchronizer.advance(self.events.done)) is not None:
            is_stopped = self.events.follow(happened)
            if isinstance(happened, EventCall):
                synchronizer.passed(is_stopped)
        return synchronizer.is_stopped

    def reach_due(self) -> bool:
        """Before the first step with these ranks: an event that was interrupted; returns whether the run stops here."""
        synchronizer = self.synchronizer
        assert synchronizer is not None, "made when the group has formed"
        while (call := synchronizer.event_due(self.events.done)) is not None:
            synchronizer.passed(self.events.follow(call))
        return synchronizer.is_stopped

    def skip_rest(self) -> bool:
        """Leave out the rest of the epoch, and end it; returns whether the run stops here."""
        synchronizer = self.synchronizer
        assert synchronizer is not None, "made when the group has formed"
        synchronizer.skip_rest()
        return self.follow(synchronizer)

    def result(self) -> RankResult:
        engine, info = self.engine, self.rank_info
        if engine.device.type == "cuda":
            self.recorder.event("memory", peak_bytes=torch.cuda.max_memory_allocated(engine.device))
        if info.world_size > 1:
            self.recorder.event("traffic", steps=len(engine.state.log), **asdict(self.group.traffic))
        known = (str(info.device), self._sampler.samples, engine.run_ahead.busy, info.machine, engine.state.samples)
        state, timeline = self.saves.result(self.stopped), Timeline.of(self.recorder, *known)
        log, parts = [*engine.state.log], list(engine.state.dropped.parts)
        rounds, traffic = [*engine.state.rounds], self.group.traffic
        if self.settler is None:
            return RankResult(state, timeline, log, rounds, traffic, parts, engine.state)
        read_gone = self.settler.read_gone
        return RankResult(state, timeline, log, rounds, traffic, parts, engine.state, info.member, read_gone)

    @property
    def has_trained(self) -> bool:
        """Whether it has trained a step since this process began."""
        return self.engine.state.trained > self._first

    def show(self) -> dict[str, Any]:
        """Where the rank is; called from the heartbeat's thread at any moment."""
        info = self.rank_info
        rounds = {} if self.synchronizer is None else self.synchronizer.progress()
        where: dict[str, Any] = {"slot": self.engine.state.trained, "phase": self.recorder.state, "rounds": rounds}
        if (awaited := info.awaited) is not None:
            where["collective"] = awaited
        if self.settler is not None:
            where |= self.settler.show()
        elif self.synchronizer is not None:
            where |= why_nobody_goes(self.engine, self.membership is not None)
        needs = self.config.min_ranks if self.config.on_fault == "go-on" else info.world_size  # to begin with
        return {**where, **info.place, "deadline": self.config.deadline, "needs": needs}

    def start_callbacks(self) -> bool:
        """on_start; returns whether a callback has stopped the run already."""
        self._call_back("on_start", 0)
        return self.surviving(self.events.agree).stopped is not None

    def end_callbacks(self) -> None:
        """After the last step on every rank: the reason of a stop is known to all, then on_end."""
        self.events.agree()
        if not self._has_ended:
            self._has_ended = True
            self._call_back("on_end", self.engine.state.trained)
        self.events.agree()

    def _call_back(self, hook: str, step: int) -> int:
        """Run this hook of the callbacks; returns the ns that they took."""
        return self.callbacks.run(hook, step, self.history)

    @property
    def stopped(self) -> str | None:
        """Why the run ends early, where callbacks asked for it and all ranks know."""
        return self.callbacks.stopped
