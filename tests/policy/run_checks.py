"""What must hold in every simulated run: every slot once, events respected, no rank missing."""

from tests.policy.cluster import Outcome


def check_stream(outcome: Outcome) -> None:
    """What must hold where epochs end at slots that nobody knew beforehand."""
    cluster, rounds = outcome.cluster, outcome.rounds
    work = sorted(outcome.work)
    assert [slot for slot, *_ in work] == list(range(cluster.total)), "not every slot exactly once"
    for one in rounds:
        assert len(one.merged_ms) == cluster.ranks, "a rank missed a round"
        assert len({row.fingerprint for row in one.rows.values()}) == 1, "copies differed before a round"
    event, free_ms = 0, 0.0
    while event < cluster.total:
        last, event = event, cluster.next_event(event)
        one = next(one for one in rounds if all(row.next_slot >= event for row in one.rows.values()))
        assert all(free_ms <= start and end <= one.met_ms for _, start, end in work[last:event]), (
            "a slot on the wrong side of an epoch's end"
        )
        free_ms = one.arrival_ms


def check(outcome: Outcome) -> None:
    """What must hold in every run, whatever the cluster."""
    cluster, rounds = outcome.cluster, outcome.rounds
    work, start, stop = sorted(outcome.work), outcome.start, outcome.stop
    assert [slot for slot, *_ in work] == list(range(start, stop)), "not every slot exactly once"
    trained = sum(cluster.samples(slot) for slot in range(start, stop))
    assert sum(row.samples for one in rounds for row in one.rows.values()) == trained, "work outside all averages"
    dues = [one.due for one in rounds]
    assert dues == sorted(dues), "rounds out of axis order"
    late = [any(row.returned or row.kept for row in one.rows.values()) for one in rounds]
    assert all(a < b or was_late for a, b, was_late in zip(dues, dues[1:], late, strict=False)), "a round without slots"
    assert dues[-1] == stop, "the last round is not at the end"
    for one in rounds:
        assert len(one.merged_ms) == cluster.ranks, "a rank missed a round"
        assert len({row.fingerprint for row in one.rows.values()}) == 1, "copies differed before a round"
        assert max(one.handed.values()) <= one.free, "a rank was handed a slot beyond the event it had still to learn"
        assert all(at_ms >= one.arrival_ms for at_ms in one.merged_ms.values()), "merged before it was there"
    event, free_ms = start, 0.0
    while event < stop:
        last, event = event, outcome.next_event(event)
        assert event in dues, "an event without a round"
        one = rounds[len(dues) - 1 - dues[::-1].index(event)]  # the last one there: before it a rank may have been late
        assert all(row.next_slot >= event for row in one.rows.values()), "a rank passed an event too early"
        assert all(free_ms <= start and end <= one.met_ms for _, start, end in work[last - start : event - start]), (
            "a slot on the wrong side of an event"
        )
        free_ms = one.arrival_ms
