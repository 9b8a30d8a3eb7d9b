"""A CUDA rank's lane: what its compute stream did, which is not what the host that enqueues for it was doing.

While the host fetches data or sends a snapshot the device may compute all the time, and a host that enqueues is no
device that computes.
"""

from collections.abc import Sequence

from uneven.timeline.record import STATES, TRAINING, Account

Span = tuple[str, int, int]


def seen_by_device(spans: Sequence[Span], busy: Sequence[tuple[int, int]]) -> list[Span]:
    """The host's spans with the device's work in them; both in order. Invariant: they cover the same time.

    In training the device's work is `compute`, whatever the host did; outside it the host says why the device was
    idle, and enqueuing is `other`. Apart from training (set-up, evaluation) the host's word stands.
    """
    found: list[Span] = []
    work = iter(busy)
    start, end = next(work, (0, 0))
    for state, first, last in spans:
        if state not in TRAINING:
            _add(found, state, first, last)
            continue
        idle = "other" if state == "compute" else state
        at = first
        while at < last:
            while end <= at and end:
                start, end = next(work, (0, 0))
            if not end or start >= last:
                _add(found, idle, at, last)
                break
            _add(found, idle, at, max(at, start))
            _add(found, "compute", max(at, start), min(last, end))
            at = min(last, end)
    return found


def account_of(rank: int, spans: Sequence[Span]) -> Account:
    totals = dict.fromkeys(STATES, 0)
    for state, first, last in spans:
        totals[state] += last - first
    return Account(rank, {state: ns / 1e9 for state, ns in totals.items()})


def _add(found: list[Span], state: str, first: int, last: int) -> None:
    if first >= last:
        return
    if found and found[-1][0] == state:
        found[-1] = (state, found[-1][1], last)
    else:
        found.append((state, first, last))
