import math

import pytest

from uneven.bench.interval import interval, quantile


def test_few_values_have_wide_intervals() -> None:
    assert interval([1.0, 2.0, 3.0, 4.0, 5.0]) == (3.0, pytest.approx(2.776 * math.sqrt(2.5 / 5)))
    assert interval([7.0]) == (7.0, math.inf)
    assert math.isnan(interval([])[0])


@pytest.mark.parametrize(("degrees", "expected"), [(1, 12.706), (4, 2.776), (30, 2.042), (40, 2.021), (120, 1.980)])
def test_the_quantile_is_that_of_the_tables(degrees: int, expected: float) -> None:
    assert quantile(degrees) == pytest.approx(expected, abs=0.003)
