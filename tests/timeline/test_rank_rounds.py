"""The stages of a round: read from an event, and recorded by real runs."""

from itertools import pairwise

import pytest

from tests.train.local_runs import train
from uneven.timeline.timeline import Timeline, rank_rounds


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_run_records_the_stages_of_every_round(policy: str) -> None:
    results = train(2, policy=policy)
    timeline = Timeline.merge([result.timeline for result in results])
    rounds = rank_rounds(timeline.events)
    for rank in range(2):
        own = [round_ for round_ in rounds if round_.rank == rank]
        assert [round_.number for round_ in own] == list(range(1, len(own) + 1))
        # How many there are depends on the measured speeds; the first entry of `rounds` is round 0.
        assert len(own) == len(results[rank].rounds) - 1 >= 1
        for round_ in own:
            assert (
                timeline.lanes[rank].spans[0][1]
                < round_.snapshot_ns
                <= round_.joined_ns
                <= round_.averaged_ns
                <= round_.merged_ns
            )
            assert round_.wire_bytes > 0
        # At most one round of a rank is in flight.
        assert all(before.merged_ns <= after.snapshot_ns for before, after in pairwise(own))
