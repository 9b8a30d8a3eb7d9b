"""What each rank reports about itself with every gradient sum or round, and the checks on what the others reported.

A rank that leaves its own loop early reports so in one last collective that carries no gradients. Every rank that
reads it raises, so no rank waits for one that will not come (tests/api/test_loop.py).
"""

from collections.abc import Sequence
from enum import IntEnum

from uneven.errors import LeftLoopError, RankError


class RankStatus(IntEnum):
    """A small number, because it travels in the same tensor as the other statistics."""

    TRAINING = 0  # the rank goes on
    STOP_REQUESTED = 1  # Ctrl-C or a stop request reached this rank; all ranks stop after the same slot
    LEFT_EPOCH = 2  # the user's loop was left in the middle of an epoch
    FINISHED = 3  # the user's loop called finish()
    NOT_FINITE = 4  # the rank has had max_bad_steps bad steps in a row (local policies)
    SKIPS_REST = 5  # the user's loop leaves out the rest of the epoch: all ranks do


def check_status(statuses: Sequence[RankStatus], slot: int) -> None:
    """LeftLoopError naming the first rank that left before this slot."""
    for rank, status in enumerate(statuses):
        if status == RankStatus.LEFT_EPOCH:
            raise LeftLoopError(
                f"rank {rank} left its epoch at slot {slot}: every rank must train every batch that "
                "ddp.batches(epoch) yields, by one ddp.step(loss) each"
            )
        if status == RankStatus.FINISHED:
            raise LeftLoopError(f"rank {rank} called ddp.finish() before slot {slot} while other ranks still train")


def check_agreement(fingerprints: Sequence[int], when: str) -> None:
    """RankError naming a rank whose replicated state (policy, params) is not the same as rank 0's."""
    for rank, fingerprint in enumerate(fingerprints):
        if fingerprint != fingerprints[0]:
            raise RankError(f"rank {rank} differs from rank 0 {when}: {list(fingerprints)}")
