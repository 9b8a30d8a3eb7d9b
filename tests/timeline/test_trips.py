"""The way of a round as it is read from an event, and as real runs record it."""

from itertools import pairwise

import pytest

from tests.train.test_local_sgd import train
from uneven.timeline.record import Event
from uneven.timeline.timeline import Timeline
from uneven.timeline.trips import trips_of


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_run_records_the_way_of_every_round(policy: str) -> None:
    results = train(2, policy=policy)
    timeline = Timeline.merge([result.timeline for result in results])
    trips = trips_of(timeline.events)
    for rank in range(2):
        own = [trip for trip in trips if trip.rank == rank]
        assert [trip.number for trip in own] == list(range(1, len(own) + 1))
        assert len(own) >= 2
        for trip in own:
            assert trip.left_ns is not None
            assert timeline.lanes[rank].spans[0][1] < trip.left_ns <= trip.met_ns <= trip.back_ns <= trip.merged_ns
            assert trip.wire_bytes is not None
            assert trip.wire_bytes > 0
        # At most one round of a rank is in flight.
        assert all(before.merged_ns <= (after.left_ns or 0) for before, after in pairwise(own))


def test_an_older_round_has_no_known_way() -> None:
    (trip,) = trips_of([Event(5, 1, "round", {"round": 2, "transfer_ms": 0.5}), Event(6, 1, "epoch", {})])
    assert (trip.rank, trip.number, trip.merged_ns, trip.left_ns, trip.wire_bytes) == (1, 2, 5, None, None)
    assert trip.cost_ms == 0.5
