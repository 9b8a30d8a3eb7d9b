import pytest
from hypothesis import given
from hypothesis import strategies as st

from uneven.errors import InputError
from uneven.hardware.yardstick import Yardstick

speeds = st.lists(st.floats(0.1, 1e6), min_size=1, max_size=8)


@pytest.mark.parametrize(("fast", "percent"), [(1.5, 80), (2.0, 67), (2.5, 57), (4.0, 40)])
def test_the_bounds_of_the_design(fast: float, percent: int) -> None:
    assert Yardstick.of([1.0, fast]).gap == fast
    assert round(100 * Yardstick.of([fast, 1.0]).ddp_bound) == percent


def test_a_gap_of_two_and_a_half() -> None:
    assert Yardstick.of([2.5, 1.0]) == Yardstick(2.5, pytest.approx(0.571, abs=5e-4), pytest.approx(0.8), 1.4)


@given(speeds)
def test_the_parts_fit_together(some: list[float]) -> None:
    found = Yardstick.of(some)
    assert found.ddp_bound * found.joint_over_fast == pytest.approx(found.ddp_over_fast)
    assert found.ddp_bound <= 1 + 1e-9
    assert 1 <= found.joint_over_fast <= len(some) * (1 + 1e-9)


@pytest.mark.parametrize("wrong", [[], [1.0, 0.0], [-1.0], [float("nan")], [float("inf")]])
def test_speeds_that_are_none_are_refused(wrong: list[float]) -> None:
    with pytest.raises(InputError, match="above 0"):
        Yardstick.of(wrong)
