"""The numbers that a rank of a local policy sends with its params in a round.

Every rank gets those of all ranks and passes them to its own copy of Windows (policy/windows.py).
"""

from typing import NamedTuple


class RoundReport(NamedTuple):
    """What one rank reports in a round. Its costs are those of the round before, which has ended."""

    next_slot: float = 0.0  # its first slot that is not in this average
    samples: float = 0.0  # since its last round; without those dropped they are its weight
    busy_ms: float = 0.0  # its own compute time for them
    transfer_ms: float = 0.0  # what snapshot and merge took of its own time
    latency_ms: float = 0.0  # from snapshot to average, waiting for others included
    loss_sum: float = 0.0
    loss_count: float = 0.0
    divergence: float = 0.0  # ||params - average|| / ||average|| at its last merge
    status: float = 0.0  # see train/gradient_sync.py; a float because the report travels in a float tensor
    fingerprint: float = 0.0
    user_ms: float = 0.0  # code of the user's own since its last round, which is not in busy_ms
    dropped: float = 0.0  # of `samples`: of steps that were not finite
    bad_slot: float = 0.0  # the last of these steps ...
    bad_cause: float = 0.0  # ... and why, see step/finite.py
    limit: float = 0.0  # slots from it on it hands out only after it has merged this round, see first_free_slot
    end_samples: float = 0.0  # of the epoch in progress, where this rank was told the end of a stream without length
    wish: float = 0.0  # to save or evaluate soon, see train/synchronizer.py
    returned: float = 0.0  # slots that it hands back because it is late, see policy/late.py ...
    kept: float = 0.0  # ... and those of this window that it still has to train
    recent_ms: float = 0.0  # of a late rank: the typical time of its last slots, where it is known
