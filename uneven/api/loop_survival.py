"""How a loop of the user's own goes on when a rank is lost: settle inside whichever call of ours the user is in.

Held by api/loop.py. The user's code never sees the loss. A step that nobody who is left has applied is void: the call
returns, the batch in the user's hands counts for nothing, and `batches` yields the samples of that step again, divided
among the ranks that are left. A step that one of them has applied counts, on all of them.

Ranks may be in different calls of ours, since the user's own code may take long: those who have lost the group wait for
the others. [Note: one call ahead] A rank can be one collective ahead of another, never two. So of the calls by which
ranks exchange something between epochs it is enough to know how many are done, and the result of the last.
"""

import torch

from uneven.api.batch_steps import BatchSteps
from uneven.api.epoch_log import EpochLog
from uneven.api.loop_resume import Calls, LoopResume
from uneven.comm.gather import gather_json
from uneven.comm.group import Group
from uneven.errors import GroupLostError
from uneven.train.worker import Worker


class LoopSurvival:
    """Life cycle: made with the loop; `settle` where a GroupLostError was raised, until the run's result is there."""

    def __init__(self, worker: Worker, steps: BatchSteps, log: EpochLog, resume: LoopResume) -> None:
        self._worker, self._steps, self._log, self._resume = worker, steps, log, resume
        self.started = -1  # the epoch that all ranks have begun together; after the last one the end of the run
        self.calls: Calls = {}  # that the others had made since their last epoch, where this rank has joined them
        self.metrics = 0  # calls of scheduler_step that are done
        self.metric = 0.0  # the value of the last
        worker.events.settle_loop = self._compare

    @property
    def is_over(self) -> bool:
        """All ranks have passed the end of the run: only its result is missing."""
        return self._worker.settler is not None and self._worker.settler.is_over

    def check(self) -> None:
        """GroupLostError where ranks were lost, or join: before a batch is handed out that would be void."""
        if self._worker.settler is not None:
            self._worker.settler.check()

    def settle(self, lost: GroupLostError) -> bool:
        """Go on with whoever is left; returns whether a callback has stopped the run. Raises where it cannot go on."""
        while True:
            if self._worker.settler is None:
                raise lost
            self._worker.settler.settle(lost)
            if self._steps.take_back():
                self._log.forget()
            try:
                return self.reach()
            except GroupLostError as error:
                lost = error

    def reach(self) -> bool:
        """What ranks that have settled do first, all of them: the event that was interrupted, if there was one."""
        worker = self._worker
        if self.is_over:
            return False
        assert worker.synchronizer is not None, "made when the group has formed"
        is_stopped = worker.events.agree().stopped is not None or worker.synchronizer.reach_event(worker.events.done)
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

    def _compare(self, group: Group) -> None:
        """With the ranks that are left, while they settle: who is one call ahead, and what came of it. A collective.

        A second loss meanwhile does no harm: who has taken something over is as far as the one that had it.
        """
        own = {
            "log": [self._log.collected, self._log.state_dict()],
            "metric": [self.metrics, self.metric],
            "calls": [self._resume.asked, self._resume.calls],
            "started": self.started,
        }
        rows = gather_json(group, own)
        self._log.catch_up(*max((row["log"] for row in rows), key=lambda log: int(log[0])))
        self.metrics, self.metric = max(row["metric"] for row in rows)
        self.started = max(row["started"] for row in rows)
        if self._worker.rank_info.is_newcomer:
            _, self.calls = max((row["calls"] for row in rows), key=lambda calls: (calls[0], sum(calls[1].values())))
