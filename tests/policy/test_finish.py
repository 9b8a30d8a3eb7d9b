from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from uneven.policy.finish import Cost, by_ratio, equal_finish, finish_ms

costs = st.builds(Cost, st.floats(0, 20), st.floats(0.05, 10))


def best_by_trying(ranks: list[Cost], samples: int, caps: list[int], least: int = 1) -> float:
    splits = (
        split
        for split in product(*(range(cap + 1) for cap in caps))
        if sum(split) == samples and all(s == 0 or s >= least for s in split)
    )
    return min((finish_ms(ranks, split) for split in splits), default=float("inf"))


@given(st.lists(costs, min_size=1, max_size=3), st.integers(1, 14), st.data())
def test_no_whole_split_finishes_sooner(ranks: list[Cost], samples: int, data: st.DataObject) -> None:
    caps = data.draw(st.lists(st.integers(0, samples), min_size=len(ranks), max_size=len(ranks)))
    assume(sum(caps) >= samples)
    shares = equal_finish(ranks, samples, caps)
    assert sum(shares) == samples
    assert all(0 <= share <= cap for share, cap in zip(shares, caps, strict=True))
    assert finish_ms(ranks, shares) <= best_by_trying(ranks, samples, caps) * (1 + 1e-9)


@given(st.lists(costs, min_size=1, max_size=3), st.integers(1, 12))
def test_with_batchnorm_no_rank_gets_a_single_sample_and_little_is_lost(ranks: list[Cost], samples: int) -> None:
    shares = equal_finish(ranks, samples, least=2)
    assert sum(shares) == samples
    possible = best_by_trying(ranks, samples, [samples] * len(ranks), least=2)
    if samples >= 2 * len(ranks):
        assert all(share != 1 for share in shares)
        assert finish_ms(ranks, shares) <= 1.6 * possible


def test_the_example_of_the_design() -> None:
    """Sixteen samples, the slow rank at 0.4 with a fixed cost: 12:4 is right where largest remainder says 11:5."""
    fast, slow = Cost(1.0, 1.0), Cost(2.5, 2.5)
    assert equal_finish([fast, slow], 16) == (12, 4)


def test_caps_that_hold_too_little_bound_nothing() -> None:
    assert equal_finish([Cost(0, 1), Cost(0, 1)], 10, caps=[2, 3]) == (5, 5)


def test_a_rank_whose_fixed_cost_is_too_high_gets_nothing() -> None:
    assert equal_finish([Cost(1, 1), Cost(1000, 1)], 16) == (16, 0)


@pytest.mark.parametrize("ranks", [1, 2, 7, 64])
def test_equal_ranks_share_equally(ranks: int) -> None:
    shares = equal_finish([Cost(1, 1)] * ranks, 10 * ranks + 3)
    assert max(shares) - min(shares) <= 1 or ranks == 1


grids = st.sampled_from([2, 4, 8])


@given(st.lists(costs, min_size=1, max_size=5), st.integers(1, 200), grids, st.sampled_from([1, 2]))
def test_on_a_grid_shares_are_multiples_but_one_and_little_is_lost(
    ranks: list[Cost], samples: int, grid: int, least: int
) -> None:
    shares = equal_finish(ranks, samples, least=least, grid=grid)
    assert sum(shares) == samples
    assert sum(share % grid != 0 for share in shares) == (samples % grid > 0)
    best = equal_finish(ranks, samples)
    up = [-(-share // grid) * grid for share in best]
    if least == 1:
        assert finish_ms(ranks, shares) <= finish_ms(ranks, up) * (1 + 1e-9)
        step = max(cost.sample_ms for cost, share in zip(ranks, best, strict=True) if share) * grid
        assert finish_ms(ranks, shares) <= finish_ms(ranks, best) + step
    elif samples >= grid:
        assert all(share == 0 or share >= least for share in shares)


@given(st.lists(costs, min_size=1, max_size=3), st.integers(1, 40), st.data())
def test_a_grid_of_one_changes_nothing(ranks: list[Cost], samples: int, data: st.DataObject) -> None:
    caps = data.draw(st.none() | st.lists(st.integers(0, samples), min_size=len(ranks), max_size=len(ranks)))
    assert equal_finish(ranks, samples, caps, grid=1) == equal_finish(ranks, samples, caps)


@given(st.lists(costs, min_size=2, max_size=4), st.integers(1, 100), grids, st.data())
def test_caps_hold_on_a_grid_where_they_can(ranks: list[Cost], samples: int, grid: int, data: st.DataObject) -> None:
    caps = data.draw(st.lists(st.integers(0, samples), min_size=len(ranks), max_size=len(ranks)))
    shares = equal_finish(ranks, samples, caps, grid=grid)
    assert sum(shares) == samples
    assert sum(share % grid != 0 for share in shares) == (samples % grid > 0)
    if sum(cap // grid for cap in caps) > samples // grid:
        assert all(share <= cap for share, cap in zip(shares, caps, strict=True))


def test_what_is_left_over_a_grid_goes_where_it_is_done_first() -> None:
    assert equal_finish([Cost(0, 1), Cost(0, 2.5)], 100, grid=8) == (72, 28)
    assert equal_finish([Cost(1, 1), Cost(1000, 1)], 100, caps=[100, 100], grid=8) == (100, 0)
    assert equal_finish([Cost(1, 1), Cost(1000, 1)], 5, grid=8) == (5, 0)


def test_caps_of_a_ratio_hold_where_they_can() -> None:
    assert by_ratio((1.0, 3.0), 64, caps=(64, 32)) == (32, 32)
    assert by_ratio((1.0, 3.0, 0.0), 64, caps=(8, 8, 64)) == (16, 48, 0)
