import pytest
from hypothesis import given
from hypothesis import strategies as st

from uneven.errors import InputError
from uneven.hardware.yardstick import ddp_bound, ddp_over_fast, gap, joint_over_fast

speeds = st.lists(st.floats(0.1, 1e6), min_size=1, max_size=8)


@pytest.mark.parametrize(("fast", "percent"), [(1.5, 80), (2.0, 67), (2.5, 57), (4.0, 40)])
def test_the_bounds_of_the_design(fast: float, percent: int) -> None:
    assert gap([1.0, fast]) == fast
    assert round(100 * ddp_bound([fast, 1.0])) == percent


def test_a_gap_of_two_and_a_half() -> None:
    assert ddp_bound([2.5, 1.0]) == pytest.approx(0.571, abs=5e-4)
    assert joint_over_fast([2.5, 1.0]) == pytest.approx(1.4)
    assert ddp_over_fast([2.5, 1.0]) == pytest.approx(0.8)


@given(speeds)
def test_the_parts_fit_together(some: list[float]) -> None:
    assert ddp_bound(some) * joint_over_fast(some) == pytest.approx(ddp_over_fast(some))
    assert ddp_bound(some) <= 1 + 1e-9
    assert 1 <= joint_over_fast(some) <= len(some) * (1 + 1e-9)


@pytest.mark.parametrize("wrong", [[], [1.0, 0.0], [-1.0], [float("nan")], [float("inf")]])
@pytest.mark.parametrize("function", [gap, ddp_bound, joint_over_fast, ddp_over_fast])
def test_speeds_that_are_none_are_refused(function, wrong) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match="above 0"):
        function(wrong)
