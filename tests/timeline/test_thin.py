"""Thinning keeps the time of every state: the area that is drawn is the time that was recorded."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.timeline.synthetic import MS, lanes_of
from uneven.timeline.record import STATES
from uneven.timeline.sample import Sample
from uneven.timeline.thin import Piece, bin_spans, busy_shares, evenly_spaced, smooth, thin_samples, thin_spans

spans = st.lists(st.tuples(st.sampled_from(STATES), st.integers(1, 1000)), min_size=1, max_size=400)


def totals(pieces: list[Piece]) -> dict[str, float]:
    area = dict.fromkeys(STATES, 0.0)
    for piece in pieces:
        area[piece.state] += (piece.high - piece.low) * (piece.end_ns - piece.start_ns)
    return area


def check(pieces: list[Piece], lane: list[tuple[str, int, int]]) -> None:
    """The pieces cover the lane's time at full height, and the area of every state is its time."""
    expected = dict.fromkeys(STATES, 0)
    for state, first, last in lane:
        expected[state] += last - first
    assert totals(pieces) == pytest.approx(expected)
    assert {state: sum(p.state_ns for p in pieces if p.state == state) for state in STATES} == expected
    stacks = sorted({(piece.start_ns, piece.end_ns) for piece in pieces})
    assert (stacks[0][0], stacks[-1][1]) == (lane[0][1], lane[-1][2])
    assert all(before[1] == after[0] for before, after in pairwise(stacks))
    for stack in stacks:
        levels = sorted((piece.low, piece.high) for piece in pieces if (piece.start_ns, piece.end_ns) == stack)
        assert levels[0][0] == 0.0
        assert levels[-1][1] == pytest.approx(1.0)
        assert all(before[1] == after[0] for before, after in pairwise(levels))


@given(spans)
def test_many_spans_become_few_pieces_of_the_same_area(pieces: list[tuple[str, int]]) -> None:
    lane = lanes_of(pieces).lanes[0].spans
    thinned, grain = thin_spans(lane, 100)
    assert len(thinned) <= 100
    assert (grain > 0) == (len(lane) > 100)
    check(thinned, lane)


@given(spans, st.integers(1, 60))
def test_columns_have_the_same_area_too(pieces: list[tuple[str, int]], bins: int) -> None:
    lane = lanes_of(pieces).lanes[0].spans
    binned = bin_spans(lane, bins)
    assert len({piece.start_ns for piece in binned}) <= bins
    check(binned, lane)


def test_long_spans_stay_as_they_are() -> None:
    pieces = [("setup", 500 * MS), *[("data", 10), ("compute", 90)] * 500, ("evaluation", 200 * MS)]
    thinned, grain = thin_spans(lanes_of(pieces).lanes[0].spans, 100)
    assert thinned[0] == Piece("setup", 0, 500 * MS, 0.0, 1.0, 500 * MS)
    assert thinned[-1].state == "evaluation"
    assert (thinned[-1].low, thinned[-1].high, thinned[-1].state_ns) == (0.0, 1.0, 200 * MS)
    stack = thinned[1:-1]
    assert [(piece.state, piece.state_ns) for piece in stack] == [("compute", 45_000), ("data", 5_000)]
    assert [(piece.low, piece.high) for piece in stack] == [(0.0, 0.9), (0.9, 1.0)]
    assert grain > 90


def test_columns_of_one_state_are_one_piece() -> None:
    lane = lanes_of([("compute", 600), ("wait", 300), ("data", 50), ("compute", 50)]).lanes[0].spans
    binned = [(piece.state, piece.start_ns, piece.end_ns, piece.state_ns) for piece in bin_spans(lane, 10)]
    assert binned == [
        ("compute", 0, 600, 600),
        ("wait", 600, 900, 300),
        ("compute", 900, 1000, 50),
        ("data", 900, 1000, 50),
    ]


def test_busy_shares_are_of_the_lanes_own_time() -> None:
    (lane,) = lanes_of([("data", 10), ("compute", 20), ("wait", 10)]).lanes
    assert busy_shares(lane.spans, [0, 20, 30, 100, 200]) == [0.5, 1.0, 0.0, None]


def test_samples_and_items_are_thinned_to_the_limit() -> None:
    samples = [Sample(t, float(t), 2.0 * t, 8 * t, 4 * t, ((0, float(t), t),) if t % 2 else ()) for t in range(1, 11)]
    thinned = thin_samples(samples, 3)
    assert [sample.t_ns for sample in thinned] == [4, 8, 10]
    assert [sample.cpu for sample in thinned] == [2.5, 6.5, 9.5]
    assert thinned[0].gpus == ((0, 2.0, 2),)
    assert thin_samples(samples, 10) == samples
    assert thin_samples([], 10) == []
    assert evenly_spaced(range(100), 4) == [0, 33, 66, 99]
    assert evenly_spaced([1, 2], 4) == [1, 2]


def test_a_smooth_curve_is_a_mean_around_each_value() -> None:
    assert smooth([0.0, 1.0, 0.0, 1.0, 0.0], 3) == [0.0, 1 / 3, 2 / 3, 1 / 3, 0.0]
    assert smooth([1.0, None, 3.0, 5.0], 3) == [1.0, None, 4.0, 5.0]
    assert smooth([2.0, 4.0, 6.0, 8.0], 99) == [2.0, 4.0, 6.0, 8.0], "a ramp stays"
    assert smooth([7.0], 1) == [7.0]
    assert smooth([], 5) == []
