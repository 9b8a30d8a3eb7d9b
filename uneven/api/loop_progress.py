"""What the user's own code has done between batches, kept so that it counts once: after a resume, after ranks are lost.

Made by api/loop.py: the numbers that were logged (EpochLog), the calls that a checkpoint contains (LoopResume), and how
far each rank is when one is lost (LoopRecovery).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from uneven.comm.gather import gather_json
from uneven.comm.group import Group
from uneven.config import ENTRY_KEYS
from uneven.errors import InputError
from uneven.step.evaluation import name_clash
from uneven.train.worker import Worker

Sums = dict[int, dict[str, list[Any]]]  # epoch -> name -> [sum of value x weight, sum of weights]
Calls = dict[str, int]


class EpochLog:
    """Numbers that the user logs with `ddp.log`: means over all ranks, weighted by samples, per epoch.

    `add` on any rank at any time, `collect` on all ranks together, at every epoch's end and the end of the run. Ranks
    may log different names, and a rank without samples none, so what travels is text and not a row of numbers.

    What was logged for the batch in the user's hands counts when it is known to be trained: `keep`, else `forget`.
    """

    def __init__(self) -> None:
        self._of_batch: list[tuple[int, str, Any, float]] = []
        self._new: Sums = {}  # of this rank, since the last collect
        self._taken: set[int] = set()  # epochs whose totals came from another rank, and are in no entry here yet
        self.collected = 0  # how often
        self._totals: Sums = {}  # of all ranks

    def add(self, epoch: int, values: Mapping[str, Any], weight: float, metrics: Collection[str] = ()) -> None:
        """Tensors are added up on their device, so that logging does not wait for it.

        `metrics`: the names of the run's own evaluation, as far as they are known; they stand in the same entries.
        """
        for name, value in values.items():
            if name in ENTRY_KEYS:
                raise InputError(f"ddp.log({name}=...): the history has an entry of that name already; choose another")
            if name in metrics:
                raise name_clash([name])
            if isinstance(value, Tensor):
                value = value.detach().double()
            if not isinstance(value, int | float | Tensor) or (isinstance(value, Tensor) and value.numel() != 1):
                raise InputError(f"ddp.log({name}=...) takes one number, got {type(value).__name__}")
            self._of_batch.append((epoch, name, value, weight))

    def keep(self) -> None:
        for epoch, name, value, weight in self._of_batch:
            entry = self._new.setdefault(epoch, {}).setdefault(name, [0.0, 0.0])
            entry[0] = entry[0] + value * weight
            entry[1] += weight
        self.forget()

    def forget(self) -> None:
        self._of_batch = []

    def collect(self, group: Group, history: Sequence[dict[str, Any]], epoch: int | None = None) -> dict[str, float]:
        """The means of an epoch that ends here; new numbers of earlier ones go into their entries. A collective."""
        self.keep()
        own = {e: {n: [float(total), weight] for n, (total, weight) in v.items()} for e, v in self._new.items()}
        rows = [own] if group.world_size == 1 else gather_json(group, own)
        self._new, self.collected = {}, self.collected + 1
        changed, self._taken = self._taken, set()
        for row in rows:
            for key, values in row.items():
                changed.add(int(key))
                for name, (total, weight) in values.items():
                    entry = self._totals.setdefault(int(key), {}).setdefault(name, [0.0, 0.0])
                    entry[0] += total
                    entry[1] += weight
        means = {
            which: {name: total / weight if weight else float("nan") for name, (total, weight) in entries.items()}
            for which, entries in self._totals.items()
            if which in changed or which == epoch  # of which numbers may have been collected for a checkpoint
        }
        ending = means.pop(-1 if epoch is None else epoch, {})
        for past in history:
            if not past.get("is_inside_epoch"):
                past.update(means.get(past["epoch"] - 1, {}))
        return ending

    def catch_up(self, collected: int, totals: Mapping[str, Any]) -> None:
        """Another rank has collected so often. Where it was once more than here, this rank's numbers are in it."""
        if collected > self.collected:
            self._new, self.collected = {}, collected
            self.load_state_dict(totals)
            self._taken = set(self._totals)

    def state_dict(self) -> dict[str, Any]:
        """After `collect`, the same on all ranks."""
        return {str(epoch): entries for epoch, entries in self._totals.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._totals = {int(epoch): {name: list(sums) for name, sums in v.items()} for epoch, v in state.items()}


class LoopResume:
    """Calls that a checkpoint contains, made again by a loop that goes on from it.

    A resumed loop runs through its done epochs again, without batches, and with it runs what the user wrote after each
    epoch: `ddp.log` and `ddp.scheduler_step`. What the checkpoint contains already must not count again; the checkpoint
    of an epoch's end is taken before the user's code after that epoch, which then counts for the first time.
    Life cycle: `start` when the group has formed, `begin` with every epoch, `counts` with every call.
    """

    def __init__(self, worker: Worker, log: EpochLog) -> None:
        self._worker = worker
        self._log = log
        self.iterated: int | None = None  # the epoch inside whose batches the user is
        self.past_epochs = 0  # epochs that were done at the checkpoint
        self._is_after_calls = False  # the checkpoint was taken when the user's code after them had run
        self._done: Calls = {}  # made after the last of them, before the checkpoint
        self._has_joined = False  # it has begun in the middle, with the state of the others
        self._epoch = -1  # that the user asked for last
        self._calls: Calls = {}  # since then
        self._calls_before: Calls = {}  # between that epoch and the one before it

    @property
    def epoch(self) -> int:
        """The epoch that the user asked for last."""
        return self._epoch

    @property
    def calls(self) -> Calls:
        """Made since the last epoch that is done."""
        synchronizer = self._worker.synchronizer
        is_inside = synchronizer is not None and self._epoch == synchronizer.epoch
        return self._calls_before if is_inside else self._calls

    def join(self, epoch: int, calls: Calls) -> None:
        """This rank joins others in this epoch, who have made these calls since the one before."""
        self.past_epochs = epoch
        self._is_after_calls = True
        self._done = calls
        self._has_joined = True

    def is_past(self, call: str) -> bool:
        """Whether the others have made this call already, together, when this rank joined them."""
        if not self._has_joined or self._epoch >= self.past_epochs:
            return False
        return self._epoch < self.past_epochs - 1 or self._calls.get(call, 0) < self._done.get(call, 0)

    def start(self, epoch: int) -> None:
        """The run begins in this epoch."""
        worker, resumed = self._worker, self._worker.resumed
        if resumed is None:
            return
        self.past_epochs = epoch
        self._is_after_calls = epoch == 0 or worker.engine.state.trained > worker.axis.epoch_end(epoch - 1)
        state = resumed.record.get("loop")
        if state is not None:  # None: the checkpoint is of fit
            self._is_after_calls |= state["is_between"]
            rank = worker.rank_info.rank
            self._done = state["calls"][rank if rank < len(state["calls"]) else 0]
            self._log.load_state_dict(state["log"])

    def begin(self, epoch: int) -> None:
        """The user asks for the batches of an epoch, which may be one that is done.

        Random states are as at the checkpoint where the user's code goes on from it, whatever ran in the meantime.
        """
        before = self._calls
        if epoch == self.past_epochs:  # a loop that begins with this epoch has not made them again
            before = {name: max(before.get(name, 0), self._done.get(name, 0)) for name in {**before, **self._done}}
        self._epoch = epoch
        self._calls = {}
        self._calls_before = before
        if (
            epoch == (self.past_epochs if self._is_after_calls else self.past_epochs - 1)
            and self._worker.resumed is not None
        ):
            self._worker.resumed.restore_random(self._worker.engine)

    def counts(self, call: str) -> bool:
        """Whether this call, made between two epochs, is to have an effect."""
        self._calls[call] = self._calls.get(call, 0) + 1
        if self._epoch != self.past_epochs - 1:
            return self._epoch >= self.past_epochs
        return self._calls[call] > self._done.get(call, 0)

    def done_epochs(self, trained: int) -> int:
        """Of so many trained epochs those whose code after them has run, too, or is running."""
        is_code_due = not self._is_after_calls and trained == self.past_epochs > self._epoch + 1
        return trained - 1 if is_code_due else trained

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, as JSON; a collective."""
        worker = self._worker
        assert worker.synchronizer is not None, "saved after round 0"
        self._log.collect(worker.group, worker.history)
        calls = gather_json(worker.group, self.calls)
        return {
            "calls": calls,
            "log": self._log.state_dict(),
            "is_between": self.iterated is None,
        }  # in the user's code between epochs


class LoopRecovery:
    """What a run asks of the user's loop; and how it goes on when a rank is lost, inside whichever call the user is in.

    The user's code never sees the loss. A step that nobody who is left has applied is void: the call returns, the batch
    in the user's hands counts for nothing, and `batches` yields the samples of that step again, divided among the ranks
    that are left. A step that one of them has applied counts, on all of them.
    Ranks may be in different calls of ours, since the user's own code may take long: those who have lost the group wait
    for the others. [Note: one call ahead] A rank can be one collective ahead of another, never two. So of the calls by
    which ranks exchange something between epochs it is enough to know how many are done, and the result of the last.
    """

    def __init__(self, worker: Worker, log: EpochLog, resume: LoopResume) -> None:
        self._worker = worker
        self._log = log
        self._resume = resume
        self.started = -1  # the epoch that all ranks have begun together; after the last one the end of the run
        self.calls: Calls = {}  # that the others had made since their last epoch, where this rank has joined them
        self.metrics = 0  # calls of scheduler_step that are done
        self.metric = 0.0  # the value of the last

    def epoch_metrics(self, epoch: int) -> dict[str, float]:
        return self._log.collect(self._worker.group, self._worker.history, epoch)

    def state_dict(self) -> dict[str, Any]:
        return self._resume.state_dict()

    @property
    def is_over(self) -> bool:
        """All ranks have passed the end of the run: only its result is missing."""
        return self._worker.settler is not None and self._worker.settler.is_over

    def check(self) -> None:
        """GroupLostError where ranks were lost, or join: before a batch is handed out that would be void."""
        if self._worker.settler is not None:
            self._worker.settler.check()

    def reach(self) -> bool:
        """What ranks that have settled do first, all of them: the event that was interrupted, if there was one.

        Returns whether a callback has stopped the run.
        """
        worker = self._worker
        if self.is_over:
            return False
        assert worker.synchronizer is not None, "made when the group has formed"
        is_stopped = worker.events.agree().stopped is not None or worker.reach_due()
        worker.synchronizer.reset_timer()
        return is_stopped

    def start(self, epoch: int) -> None:
        """All ranks begin an epoch: those who wait to join come in here. A collective."""
        settler, worker = self._worker.settler, self._worker
        if settler is not None:
            newest = worker.group.all_reduce_max(torch.tensor([float(settler.deferred)])).wait()
            self.started = epoch
            settler.let_in(int(newest.item()))
        self.started = epoch

    def note_metric(self, value: float) -> None:
        self.metrics, self.metric = self.metrics + 1, value

    def compare(self, group: Group) -> None:
        """With the ranks that are left, while they settle: who is one call ahead, and what came of it. A collective.

        A second loss meanwhile does no harm: who has taken something over is as far as the one that had it.
        """
        own = {
            "log": [self._log.collected, self._log.state_dict()],
            "metric": [self.metrics, self.metric],
            "calls": [self._resume.epoch, self._resume.calls],
            "started": self.started,
        }
        rows = gather_json(group, own)
        self._log.catch_up(*max((row["log"] for row in rows), key=lambda log: int(log[0])))
        self.metrics, self.metric = max(row["metric"] for row in rows)
        self.started = max(row["started"] for row in rows)
        if self._worker.rank_info.is_newcomer:
            _, self.calls = max((row["calls"] for row in rows), key=lambda calls: (calls[0], sum(calls[1].values())))


def common_metric(group: Group, metric: Any) -> float:
    """The mean of a metric over the ranks that have one (None: it was not evaluated here); a collective."""
    try:
        row = [0.0, 0.0] if metric is None else [float(metric), 1.0]
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"ddp.scheduler_step(metric) takes one number, got {type(metric).__name__}") from None
    total, count = group.all_reduce(torch.tensor(row, dtype=torch.float64)).wait().tolist()
    if not count:
        raise InputError("ddp.scheduler_step(None) on every rank: one rank at least must have evaluated the metric")
    return float(total / count)
