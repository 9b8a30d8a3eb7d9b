"""What each rank tells the others with every gradient sum, and where a rank's time in such a sum went.

train/gradient_sync.py sends and reads it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from uneven.timeline.record import Recorder
from uneven.train.status import RankStatus


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
    return int(StepStats(*row).status) not in (RankStatus.TRAINING, RankStatus.STOP_REQUESTED)


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
