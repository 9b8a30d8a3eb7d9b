"""The causes of idle time: an example of each; no time is lost or counted twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.timeline.synthetic import MS, lanes_of
from uneven.timeline.idle import Gap, idle_by_cause, idle_gaps, mean_sampled, mean_utilisation
from uneven.timeline.record import NOT_TRAINING, STATES, Event
from uneven.timeline.sample import Sample
from uneven.timeline.timeline import Lane, Timeline


def causes(timeline: Timeline, rank: int = 0) -> list[tuple[tuple[str, int], ...]]:
    return [gap.parts for gap in idle_gaps(timeline, at_least_ns=1) if gap.rank == rank]


def test_causes_that_follow_from_the_own_state() -> None:
    lane = [("setup", 5), ("compile", 3), ("communication", 2), ("compute", 9), ("data", 4), ("compute", 1)]
    lane += [("communication", 6), ("compute", 1), ("evaluation", 7), ("checkpoint", 2), ("compute", 1), ("other", 3)]
    assert causes(lanes_of(lane)) == [
        (("start-up", 7), ("compile", 3)),  # communication before the first step is the rendezvous
        (("data", 4),),
        (("communication", 6),),
        (("evaluation", 7), ("checkpoint", 2)),
        (("unexplained", 3),),
    ]


def test_the_unexplained_rest_of_a_gap_in_which_an_epoch_ends_is_epoch_end() -> None:
    timeline = lanes_of([("compute", 10), ("other", 4), ("evaluation", 6), ("compute", 10), ("other", 4)])
    ended = Timeline(timeline.lanes, timeline.accounts, [Event(12, 0, "epoch", {"epoch": 1})], [])
    assert causes(ended) == [(("evaluation", 6), ("epoch end", 4)), (("unexplained", 4),)]
    other_rank = Timeline(timeline.lanes, timeline.accounts, [Event(12, 1, "epoch", {"epoch": 1})], [])
    assert causes(other_rank)[0] == (("evaluation", 6), ("unexplained", 4))


def test_a_rank_waits_for_the_rank_that_joins_last() -> None:
    fast = [("compute", 10), ("wait", 30), ("communication", 5), ("compute", 5)]
    slow = [("compute", 40), ("communication", 5), ("compute", 5)]
    middle = [("compute", 30), ("wait", 10), ("communication", 5), ("compute", 5)]
    timeline = lanes_of(fast, slow, middle)
    assert causes(timeline, 0) == [(("waiting for rank 1", 30), ("communication", 5))]
    assert causes(timeline, 2) == [(("waiting for rank 1", 10), ("communication", 5))]
    assert causes(timeline, 1) == [(("communication", 5),)]


def test_the_last_rank_may_be_late_because_of_its_data() -> None:
    waiting = [("compute", 10), ("wait", 30), ("compute", 5)]
    loading = [("compute", 15), ("data", 25), ("communication", 5)]
    assert causes(lanes_of(waiting, loading)) == [(("waiting for rank 1", 30),)]


def test_waiting_after_all_ranks_have_joined_is_transfer() -> None:
    timeline = lanes_of(
        [("compute", 10), ("wait", 30), ("compute", 5)], [("compute", 18), ("wait", 22), ("compute", 5)]
    )
    assert causes(timeline, 0) == [(("communication", 22), ("waiting for rank 1", 8))]
    assert causes(timeline, 1) == [(("communication", 22),)]
    assert causes(lanes_of([("compute", 10), ("wait", 5), ("compute", 1)])) == [(("unexplained", 5),)]


def test_a_gap_is_one_interval_with_the_cause_of_its_largest_part() -> None:
    timeline = lanes_of([("compute", MS), ("data", MS // 4), ("communication", MS), ("compute", MS), ("data", MS - 1)])
    (gap,) = idle_gaps(timeline)
    assert gap == Gap(0, MS, 2 * MS + MS // 4, (("communication", MS), ("data", MS // 4)))
    assert (gap.cause, gap.length_ns) == ("communication", MS + MS // 4)


lane = st.lists(st.tuples(st.sampled_from(STATES), st.integers(0, 50)), min_size=1, max_size=25)


@given(st.lists(lane, min_size=1, max_size=4), st.lists(st.integers(0, 400), max_size=4))
def test_the_causes_add_up_to_all_time_that_is_not_compute(lanes: list[list[tuple[str, int]]], ends: list[int]) -> None:
    made = lanes_of(*lanes)
    events = [Event(t, rank, "epoch", {}) for t in sorted(ends) for rank in range(len(lanes))]
    timeline = Timeline(made.lanes, made.accounts, events, [])
    seconds = idle_by_cause(timeline)
    gaps = idle_gaps(timeline, at_least_ns=0)
    for rank, pieces in enumerate(lanes):
        idle = sum(length for state, length in pieces if state != "compute")
        assert sum(seconds[rank].values()) == pytest.approx(idle / 1e9)
        own = [gap for gap in gaps if gap.rank == rank]
        assert sum(gap.length_ns for gap in own) == idle
        for gap in own:
            assert sum(ns for _, ns in gap.parts) == gap.length_ns
            assert all(ns > 0 for _, ns in gap.parts)
            inside = [s for s, a, b in made.lanes[rank].spans if a < gap.end_ns and gap.start_ns < b and a < b]
            assert "compute" not in inside
        assert {cause for cause in seconds[rank] if cause.startswith("waiting")} <= {
            f"waiting for rank {other}" for other in range(len(lanes)) if other != rank
        }


def test_utilisation_is_the_part_of_training_time_spent_computing() -> None:
    spans = [("setup", 0, 100), ("compute", 100, 130), ("wait", 130, 140), ("evaluation", 140, 900)]
    assert mean_utilisation(Lane(0, "cpu", spans)) == pytest.approx(0.75)
    assert mean_utilisation(Lane(0, "cpu", [(state, 0, 10) for state in NOT_TRAINING[:1]])) == 0.0


def sample(t: int, cpu: float, *gpus: tuple[int, float]) -> Sample:
    return Sample(t, cpu, 2 * cpu, 0, 0, tuple((index, value, 0) for index, value in gpus))


def test_the_mean_of_samples_weighs_each_by_its_time() -> None:
    samples = [sample(100, 99.0), sample(200, 10.0, (0, 50.0)), sample(1000, 100.0, (1, 20.0)), sample(1100, 0.0)]
    timeline = Timeline(lanes_of([("compute", 1100)]).lanes, [], [], samples)
    means = mean_sampled(timeline)
    assert means["cpu"] == pytest.approx((100 * 10 + 800 * 100 + 100 * 0) / 1000)  # the mean of the four is 52
    assert means["process"] == pytest.approx(2 * means["cpu"])
    assert (means["gpu 0"], means["gpu 1"]) == (50.0, 20.0)
    assert mean_sampled(timeline, (150, 250))["cpu"] == pytest.approx((50 * 10 + 50 * 100) / 100)
    assert mean_sampled(Timeline(timeline.lanes, [], [], samples[:1])) == {}
