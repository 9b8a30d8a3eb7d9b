"""What a loop of the user's own needs to go on from a checkpoint: epochs that are done, and calls made after them.

A resumed loop runs through its done epochs again, without batches, and with it runs what the user wrote after each
epoch: `ddp.log` and `ddp.scheduler_step`. What the checkpoint contains already must not count again; the checkpoint of
an epoch's end is taken before the user's code after that epoch, which then counts for the first time.
"""

from typing import Any

from uneven.api.epoch_log import EpochLog
from uneven.api.loop_leave import LoopLeaving
from uneven.comm.gather import gather_json
from uneven.errors import InputError
from uneven.results.state import TrainedState
from uneven.train.resume import Resumed, find_end
from uneven.train.user_state import register
from uneven.train.worker import Worker

Calls = dict[str, int]


class LoopResume:
    """Made by api/loop.py. `start` when the group has formed, `begin` with every epoch, `counts` with every call."""

    def __init__(self, worker: Worker, log: EpochLog) -> None:
        self._worker, self._log = worker, log
        self.passed = 0  # epochs that were done at the checkpoint
        self._is_after_calls = False  # the checkpoint was taken when the user's code after them had run
        self._done: Calls = {}  # made after the last of them, before the checkpoint
        self._has_joined = False  # it has begun in the middle, with the state of the others
        self._epoch = -1  # that the user asked for last
        self._calls: Calls = {}  # since then
        self._calls_before: Calls = {}  # between that epoch and the one before it

    @property
    def asked(self) -> int:
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
        self.passed, self._is_after_calls, self._done, self._has_joined = epoch, True, calls, True

    def is_past(self, call: str) -> bool:
        """Whether the others have made this call already, together, when this rank joined them."""
        if not self._has_joined or self._epoch >= self.passed:
            return False
        return self._epoch < self.passed - 1 or self._calls.get(call, 0) < self._done.get(call, 0)

    def start(self, epoch: int) -> None:
        """The run begins in this epoch."""
        worker, resumed = self._worker, self._worker.resumed
        if resumed is None:
            return
        self.passed = epoch
        self._is_after_calls = epoch == 0 or worker.engine.trained > worker.axis.epoch_end(epoch - 1)
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
        if epoch == self.passed:  # a loop that begins with this epoch has not made them again
            before = {name: max(before.get(name, 0), self._done.get(name, 0)) for name in {**before, **self._done}}
        self._epoch, self._calls, self._calls_before = epoch, {}, before
        if epoch == (self.passed if self._is_after_calls else self.passed - 1) and self._worker.resumed is not None:
            self._worker.resumed.restore_random(self._worker.engine)

    def counts(self, call: str) -> bool:
        """Whether this call, made between two epochs, is to have an effect."""
        self._calls[call] = self._calls.get(call, 0) + 1
        if self._epoch != self.passed - 1:
            return self._epoch >= self.passed
        return self._calls[call] > self._done.get(call, 0)

    def done_epochs(self, trained: int) -> int:
        """Of so many trained epochs those whose code after them has run, too, or is running."""
        is_code_due = not self._is_after_calls and trained == self.passed > self._epoch + 1
        return trained - 1 if is_code_due else trained

    def state_dict(self, is_between: bool) -> dict[str, Any]:
        """For a checkpoint, as JSON; a collective. `is_between`: it is taken in the user's code between epochs."""
        worker = self._worker
        assert worker.synchronizer is not None, "saved after round 0"
        self._log.collect(worker.group, worker.history)
        calls = gather_json(worker.group, self.calls)
        return {"calls": calls, "log": self._log.state_dict(), "is_between": is_between}


class CheckpointCalls(LoopLeaving):
    """The part of Loop (api/loop.py) by which the user says what is saved, and when."""

    _is_stopped: bool
    _resume: LoopResume
    _at_end: Resumed | None = None  # the last checkpoint of a run that was over before this process began

    @property
    def epoch(self) -> int:
        """Epochs that are done: `for epoch in range(ddp.epoch, ddp.epochs)` passes over those before a checkpoint.

        One at whose end the checkpoint was taken comes once more, without batches: the code after it has not run.
        """
        if self._state is not None:
            return self.worker.axis.epochs
        return self._resume.done_epochs(self._synchronizer.epoch)

    def register(self, name: str, value: Any) -> Any:
        """Keep `value` in every checkpoint under this name; returns it, with its saved state in a resumed run.

        Anything with state_dict and load_state_dict, or numbers, text, tensors, and lists and dicts of them. An object
        is given its state in place; a plain number comes back as it was saved, and is kept anew by another call.
        Steps save from inside: what belongs to a batch is changed before its `ddp.step`.
        """
        if self._is_stopped and self._at_end is None:
            return value
        if not self._is_stopped:
            self._check_usable()
        resumed = self._at_end or self.worker.resumed
        return register(self.worker.run, name, value, dict if resumed is None else resumed.user_state)

    def _load_end(self, state: TrainedState) -> None:
        """Of a run that was over before this process began: what its result does not hold is in its last checkpoint."""
        assert state.folder is not None, "it was read from there"
        self._at_end = find_end(state.folder, state.slot, self.worker.rank_info)
        if self._at_end is not None:
            self._at_end.restore_optimizer(self.worker.engine)
            return
        missing = f"  no checkpoint of the end of {state.folder} is here: optimizer state and registered values are"
        self.worker.report.say([f"{missing} as at the beginning; a run keeps them with save_every=..."])

    def checkpoint(self) -> None:
        """Ask for a checkpoint: it is taken at the next slot where all ranks can meet. Any rank may ask."""
        if self._is_stopped:
            return
        self._check_usable()
        if self.worker.saves.out is None:
            raise InputError("ddp.checkpoint() needs a folder to write to: pass out='runs/my-run' to Ddp.setup")
        if self.worker.saves.why_not is not None:
            raise InputError(f"ddp.checkpoint(): {self.worker.saves.why_not}")
        self.worker.wishes.requests.save.set()
