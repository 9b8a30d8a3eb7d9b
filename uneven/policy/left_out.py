"""Which ranks of a local policy are left out because they became too slow to help, and when each is tried again.

A rank that trains a hundredth of the slots makes windows a hundred slots long and adds nothing. One that was slow from
the start was wanted so; one that *became* far slower is left out: it trains nothing and only follows the averages.
Now and then it gets a single slot, as rarely as the time for it allows, and comes back when that was fast. Pure
arithmetic on what all ranks know; policy/windows.py calls it.
"""

import math
from collections.abc import Sequence

import numpy as np

from uneven.policy.typical import Flags, Floats, Ints

SLOWED = 4.0  # times slower than it was: below that it is an ordinary change
USE = 0.02  # of all ranks' speed: what it must add
PROBE_COST = 0.05  # of the time between two probes: what one may take
PROBE_ROUNDS = (8, 512)  # between two probes: at least and at most


def next_probes(probe_in: Ints, slot_ms: Floats, usual_ms: Floats, window_ms: float, was_tried: Flags) -> Ints:
    """Rounds until each rank is tried again, 0 for in the next window; -1 where it takes part. After every round.

    `slot_ms` and `usual_ms`: every rank's present time per slot, and the shortest so far. `probe_in`: the last answer.
    """
    margin = np.where(probe_in >= 0, 1.5, 1.0)  # a rank that is out must be clearly better to come back
    has_slowed = slot_ms * margin > SLOWED * usual_ms
    if not has_slowed.any():
        return np.full(len(probe_in), -1)
    use = USE * math.fsum((1.0 / slot_ms).tolist())
    is_out = has_slowed & (1.0 / slot_ms < margin * use)
    least, most = PROBE_ROUNDS
    fresh = np.ceil(slot_ms / (PROBE_COST * max(window_ms, 1e-9)))
    begins = (probe_in < 0) | ((probe_in == 0) & was_tried)
    waits = np.where(begins, np.minimum(np.maximum(fresh, least), most), np.maximum(probe_in - 1, 0))
    return np.where(is_out, waits, -1).astype(np.int64)


def with_probes(counts: Sequence[int], probe_in: Ints) -> tuple[int, ...]:
    """One slot for each rank that is tried now, of whoever has the most."""
    cut = list(counts)
    for rank in np.flatnonzero(probe_in == 0).tolist():
        if max(cut) > 1:
            cut[cut.index(max(cut))] -= 1
            cut[rank] += 1
    return tuple(cut)
