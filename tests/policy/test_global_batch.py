"""How large a step is made where sums of gradients take long."""

import pytest

from uneven.policy.finish import Cost
from uneven.policy.global_batch import SUM_SHARE, choose_factor, step_ms


@pytest.mark.parametrize(
    ("compute_ms", "sum_ms", "most", "factor"),
    [
        (9.0, 1.0, 8, 1),  # a tenth already
        (8.9, 1.0, 8, 2),
        (3.0, 1.0, 8, 3),
        (1.0, 2.0, 8, 8),  # 18 would be needed
        (1.0, 2.0, 100, 18),
        (1.0, 2.0, 1, 1),
        (1.0, 2.0, 0, 1),  # the data set is smaller than a step
        (0.0, 2.0, 8, 1),  # nothing was measured
    ],
)
def test_the_least_factor_that_makes_sums_cheap(compute_ms: float, sum_ms: float, most: int, factor: int) -> None:
    assert choose_factor(compute_ms, sum_ms, most) == factor


def test_one_less_would_not_do() -> None:
    for compute_ms in (0.5, 1.0, 1.7, 3.3, 7.0):
        factor = choose_factor(compute_ms, 2.0, 1000)
        parts = [2.0 / (many * compute_ms + 2.0) for many in (factor, factor - 1)]
        assert parts[0] <= SUM_SHARE + 1e-9 < parts[1]


def test_a_step_takes_as_long_as_its_ranks_when_all_finish_together() -> None:
    assert step_ms([Cost(0.0, 1.0), Cost(0.0, 3.0)], 16) == 12.0
