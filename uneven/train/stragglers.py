"""What the user is told of a device that became too slow to help: when it is left out, and when it is back.

The policies decide (policy/exact.py, policy/windows.py), on all ranks alike. GradientSync and LocalSGD pass on every
change of the shares; the lines are printed once, and the timeline has an event for each in the device's own lane.
"""

from collections.abc import Sequence

from uneven.timeline.record import Recorder
from uneven.train.rank_info import RankInfo

MOST_LINES = 3  # a rank: one at the edge of use goes in and out, and the timeline has the rest


class Stragglers:
    """`follow` with every change of the shares or counts, in order. A rank that never had any is no straggler."""

    def __init__(self, recorder: Recorder, rank_info: RankInfo, shares: Sequence[int]) -> None:
        self._recorder, self._rank_info = recorder, rank_info
        self._took_part = [share > 0 for share in shares]
        self._is_out = [False] * rank_info.world_size
        self._lines = [0] * rank_info.world_size

    def follow(self, slot: int, shares: Sequence[int]) -> list[str]:
        """The shares from this slot on; returns lines to print."""
        lines = []
        for rank, share in enumerate(shares):
            is_out = share == 0 and self._took_part[rank]
            self._took_part[rank] |= share > 0
            if is_out == self._is_out[rank]:
                continue
            self._is_out[rank] = is_out
            if rank == self._rank_info.rank:
                self._recorder.event("straggler", slot=slot, change="left out" if is_out else "back")
            self._lines[rank] += is_out
            if self._lines[rank] <= MOST_LINES:
                lines.append(describe_straggler(slot, f"rank {rank} ({self._rank_info.devices[rank]})", is_out))
        return lines


def describe_straggler(slot: int, name: str, is_out: bool) -> str:
    if is_out:
        return (
            f"  {name} became too slow to help and is left out from step {slot} on; it is tried again now and then "
            "(too hot, or another program?)"
        )
    return f"  {name} is fast enough again and takes part from step {slot} on"
