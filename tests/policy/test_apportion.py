from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uneven.policy.apportion import apportion, check_shares, cut_by

SHARES = st.lists(st.floats(0, 1e6).filter(lambda x: x == 0 or x > 1e-6), min_size=1, max_size=6).filter(any)


@given(st.integers(0, 10**9), SHARES)
def test_nobody_is_off_by_a_whole_unit_and_nothing_is_lost(total: int, shares: list[float]) -> None:
    counts = apportion(total, shares)
    assert sum(counts) == total
    for count, share in zip(counts, shares, strict=True):
        assert abs(count - total * share / sum(shares)) < 1 + 1e-6
        assert share > 0 or count == 0


@given(st.integers(1, 1000), SHARES)
def test_a_larger_share_never_gets_less(total: int, shares: list[float]) -> None:
    counts = apportion(total, shares)
    pairs = sorted(zip(shares, counts, strict=True))
    assert all(first[1] <= second[1] for first, second in pairwise(pairs) if first[0] < second[0] * 0.999)


@pytest.mark.parametrize("shares", [(), (0.0, 0.0), (1.0, -1.0), (float("nan"), 1.0), (float("inf"), 1.0)])
def test_what_is_no_share_is_told(shares: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="shares"):
        check_shares(shares)


def test_cuts_begin_at_nothing_and_end_at_all() -> None:
    assert cut_by([]) == [0]
    assert cut_by([3, 0, 4]) == [0, 3, 3, 7]
