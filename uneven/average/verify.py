"""What `verify` concludes from every rank's checksum: whose memory or wire has changed bits, and what follows.

Used by average/background.py, and by train/ where ranks settle and at the end of a run. All ranks have the same
checksums and so come to the same verdict, each for itself. A rank that is to blame fails, as any rank does that raises:
its process ends and the others go on without it. They give up the group that they had with it. Without a Membership
either error ends the run.
"""

from collections import Counter
from collections.abc import Collection, Sequence

from uneven.errors import GroupLostError, RankError

ODD_AVERAGE = "rank {odd} has another average than rank {right}"
ODD_REPLICA = "rank {odd} differs from rank {right} in its params or buffers at the end"
CHANGED_BEFORE = "rank {odd}: the snapshot changed between its taking and its sending"
CHANGED_SINCE = "rank {odd}: the snapshot changed between its sending and its merge"


def odd_ranks(checksums: Sequence[int], suspects: Collection[int] = ()) -> list[int] | None:
    """The ranks that differ from more than half of those that are not suspects; None where there is no such half."""
    trusted = [checksum for rank, checksum in enumerate(checksums) if rank not in suspects]
    (right, count), *_ = Counter(trusted).most_common(1) or [(0, 0)]
    if 2 * count <= len(trusted):
        return None
    return [rank for rank, checksum in enumerate(checksums) if checksum != right and rank not in suspects]


def judge(checksums: Sequence[int], rank: int, words: str, suspects: Collection[int] = (), *, can_redo: bool) -> None:
    """Returns where all ranks have the same bits; `rank` is this one, `words` name the stage, for one of the others.

    `suspects` know by themselves that their own snapshot has changed, whatever their checksums are. Where nobody can
    say who is right, as of two ranks that differ, all give up the group: with `can_redo` a new one repeats what they
    did, for nothing was changed by it. Without it the run ends.
    """
    odd = odd_ranks(checksums, suspects)
    if odd is None and not suspects:
        differs = next(other for other, checksum in enumerate(checksums) if checksum != checksums[0])
        why = f"verify: {words.format(odd=differs, right=0)}, and no majority says which of them is right"
        raise GroupLostError(why) if can_redo else RankError(why)
    if not (blamed := sorted({*suspects, *(odd or ())})):
        return
    named = rank if rank in blamed else blamed[0]
    right = next((other for other in range(len(checksums)) if other not in blamed), 0)
    why = "verify: " + (CHANGED_SINCE if named in suspects else words).format(odd=named, right=right)
    raise RankError(why) if rank in blamed else GroupLostError(why)
