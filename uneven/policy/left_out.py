"""Which ranks of a local policy are left out because they became too slow to help, and when each is tried again.

A rank that trains a hundredth of the slots makes windows a hundred slots long and adds nothing. One that was slow from
the start was wanted so; one that *became* far slower is left out: it trains nothing and only follows the averages.
Now and then it gets a single slot, as rarely as the time for it allows, and comes back when that was fast. Pure
arithmetic on what all ranks know; policy/windows.py calls it.
"""

import math
from collections.abc import Sequence

SLOWED = 4.0  # times slower than it was: below that it is an ordinary change
USE = 0.02  # of all ranks' speed: what it must add
PROBE_COST = 0.05  # of the time between two probes: what one may take
PROBE_ROUNDS = (8, 512)  # between two probes: at least and at most


def next_probe(
    rank: int, probe_in: int, slot_ms: Sequence[float], usual_ms: Sequence[float], window_ms: float, was_tried: bool
) -> int:
    """Rounds until the rank is tried again, 0 for in the next window; -1 where it takes part. Called after every round.

    `slot_ms` and `usual_ms`: every rank's present time per slot, and the shortest so far. `probe_in`: the last answer.
    """
    if not _is_below_use(rank, slot_ms, usual_ms, probe_in >= 0):
        return -1
    if probe_in < 0 or (probe_in == 0 and was_tried):
        least, most = PROBE_ROUNDS
        return max(least, min(most, math.ceil(slot_ms[rank] / (PROBE_COST * max(window_ms, 1e-9)))))
    return max(0, probe_in - 1)


def with_probes(counts: Sequence[int], probe_in: Sequence[int]) -> tuple[int, ...]:
    """One slot for each rank that is tried now, of whoever has the most."""
    cut = list(counts)
    for rank, rounds in enumerate(probe_in):
        if rounds == 0 and max(cut) > 1:
            cut[cut.index(max(cut))] -= 1
            cut[rank] += 1
    return tuple(cut)


def _is_below_use(rank: int, slot_ms: Sequence[float], usual_ms: Sequence[float], is_out: bool) -> bool:
    """A rank that is out must be clearly better to come back."""
    margin = 1.5 if is_out else 1.0
    has_slowed = slot_ms[rank] * margin > SLOWED * usual_ms[rank]
    return has_slowed and 1.0 / slot_ms[rank] < margin * USE * sum(1.0 / ms for ms in slot_ms)
