"""What each rank tells the others with every gradient sum: how long it worked, and where its time in the sum went.

train/gradient_sync.py sends and reads it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from uneven.timeline.record import Recorder
from uneven.train.agreement import RankStatus
from uneven.train.rank_info import RankInfo


class StepStats(NamedTuple):
    """What each rank sends to the others with every gradient sum."""

    busy_ms: float  # this rank's own work in the step, without waiting
    is_unrepresentative: float  # 1 where busy_ms is no measure of its speed (a new size, a capture)
    status: float  # RankStatus
    fingerprint: float  # of the policy's state: equal on all ranks
    user_ms: float = 0.0  # code of the user's own since the last step, which is not in busy_ms
    wish: float = 0.0  # Wish


def is_leaving(row: Sequence[float]) -> bool:
    """Whether the rank with these statistics takes no part in the step."""
    return int(StepStats._make(row).status) not in (RankStatus.TRAINING, RankStatus.STOP_REQUESTED)


def record_wait(recorder: Recorder, own: StepStats, stats: Sequence[StepStats], sent_ns: int, summed_ns: int) -> None:
    """Divide the time between the two: until the last rank came this one waited, the rest was communication.

    What the last rank worked longer is waiting. What it came later still, it spent in code of the user's own
    (an evaluation between epochs, on rank 0 alone): that is the user's time on this rank, too.
    """
    waited_ms = max(rank.user_ms + rank.busy_ms for rank in stats) - (own.user_ms + own.busy_ms)
    user_ms = max(0.0, waited_ms - (max(rank.busy_ms for rank in stats) - own.busy_ms))
    if user_ms:
        recorder.enter("user", sent_ns)
        recorder.enter("wait", min(summed_ns, sent_ns + int(user_ms * 1e6)))
    recorder.enter("communication", min(summed_ns, sent_ns + int(waited_ms * 1e6)))
    recorder.enter("compute", summed_ns)


class StepTimer:
    """Times a rank's own work in a step: without waiting for others, and without code of the user's own.

    Life cycle: `start` when a collective has ended, or anything that is no training step; `stop` when the rank's
    gradients are complete. Waits in between, as for the statistics of synchronised BatchNorm, are left out.
    """

    def __init__(self, rank_info: RankInfo) -> None:
        self._rank_info = rank_info
        self._started_ns = 0
        self._waited_s = 0.0  # that this rank had waited in collectives until then
        self._user_ns = 0
        self.stopped_ns = 0
        self.busy_ms = 0.0  # between the last `start` and `stop`

    def start(self, now_ns: int) -> None:
        self._started_ns, self._waited_s = now_ns, self._rank_info.group.traffic.wait_s

    def stop(self, now_ns: int) -> None:
        self.stopped_ns, self.busy_ms = now_ns, (now_ns - self.began_ns) / 1e6

    @property
    def began_ns(self) -> int:
        """The start, later by all that was left out since."""
        return self._started_ns + int((self._rank_info.group.traffic.wait_s - self._waited_s) * 1e9)

    def leave_out(self, ns: int) -> None:
        self._started_ns += ns

    def note_user_time(self, ns: int) -> None:
        """Code of the user's own ran for so long."""
        self._user_ns += ns
        self.leave_out(ns)

    def take_user_ms(self) -> float:
        """The time of the user's own code since the last call."""
        user_ms, self._user_ns = self._user_ns / 1e6, 0
        return user_ms
