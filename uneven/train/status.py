"""The word each rank says with every gradient sum: going on, asked to stop, or leaving.

A rank that leaves its own loop says so in a last sum that carries no gradients; whoever hears it raises, so nobody
waits for a rank that will not come.
"""

from collections.abc import Sequence

from uneven.errors import RankError

GOING_ON, STOP, BROKE_OFF, FINISHED = 0.0, 1.0, 2.0, 3.0


def check_status(words: Sequence[float], slot: int) -> None:
    """RankError when a rank has left before this slot, naming it."""
    for rank, word in enumerate(words):
        if word == BROKE_OFF:
            raise RankError(
                f"rank {rank} broke off its epoch at slot {slot}: every rank must train every batch that "
                "ddp.batches(epoch) yields, by one ddp.step(loss) each"
            )
        if word == FINISHED:
            raise RankError(f"rank {rank} called ddp.finish() before slot {slot} while others train on")


def check_agreement(prints: Sequence[int], when: str) -> None:
    """What is replicated must be equal; RankError names a rank whose copy is not."""
    for rank, one in enumerate(prints):
        if one != prints[0]:
            raise RankError(f"rank {rank} differs from rank 0 {when}: {list(prints)}")
