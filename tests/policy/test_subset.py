import random

import pytest

from uneven.policy.finish import Cost
from uneven.policy.subset import Forecast, advice, forecast, forecast_local


def test_a_large_job_pays_and_nothing_is_said() -> None:
    found = forecast([Cost(1, 1), Cost(2.5, 2.5)], 64, sum_ms=2.0)
    assert found.subset == (0, 1)
    assert found.together == pytest.approx(1e3 * 64 / 49.5, rel=0.03)
    assert advice(found, ["cpu", "cpu@0.4"]) == []


def test_a_small_job_names_the_single_device() -> None:
    found = forecast([Cost(0.5, 0.01), Cost(1.2, 0.025)], 128, sum_ms=3.0)
    (text,) = advice(found, ["cpu", "cpu@0.4"])
    assert text is not None
    assert "use devices='cpu'" in text


def test_where_all_together_are_faster_by_too_little_the_single_device_is_named() -> None:
    """It said: use devices='cpu,cpu', which was what ran."""
    (text,) = advice(Forecast(102.0, 100.0, 0, 102.0, (0, 1)), ["cpu", "cpu"])
    assert text.endswith("together ~102 samples/s, cpu alone ~100; use devices='cpu'")


def test_where_two_of_three_pay_they_are_named_and_not_a_single_one() -> None:
    (text,) = advice(Forecast(90.0, 100.0, 0, 180.0, (0, 1)), ["cpu", "cuda:0", "cpu@0.1"])
    assert text == "fewer devices would be faster (~180 against ~90 samples/s): use devices='cpu,cuda:0'"


def test_one_useless_device_among_good_ones_is_named_by_leaving_it_out() -> None:
    found = forecast([Cost(0, 1.0), Cost(0, 1.0), Cost(0, 1.0), Cost(500, 1)], 96, sum_ms=1.0)
    assert found.subset == (0, 1, 2)


def test_the_best_subset_is_never_slower_than_all_or_one() -> None:
    rng = random.Random(0)
    for ranks in (2, 3, 5, 12):
        for _ in range(50):
            costs = [Cost(rng.uniform(0, 5), rng.uniform(0.05, 5)) for _ in range(ranks)]
            found = forecast(costs, 8 * ranks, sum_ms=rng.uniform(0, 20))
            assert found.best >= found.together * (1 - 1e-9)
            assert found.best >= found.best_single * (1 - 1e-9)


def local(costs: list[Cost], round_ms: float, max_anchor: int = 200, target: float = 0.03) -> Forecast:
    return forecast_local(costs, 64, round_ms, max_anchor, target)


def test_local_speeds_add_up_but_for_what_rounds_may_cost() -> None:
    found = local([Cost(0, 1.0), Cost(36, 1.0)], round_ms=2.0)
    assert found.best_single == pytest.approx(1000.0), "alone there are no rounds"
    assert found.together == pytest.approx((1000.0 + 640.0) * 0.97), "a fixed cost counts in every slot"
    assert found.subset == (0, 1)
    assert advice(found, ["cpu", "cpu@0.4"]) == []


def test_a_slow_device_is_of_use_where_nobody_waits_for_it() -> None:
    costs = [Cost(0, 1.0), Cost(0, 1.0), Cost(0, 10.0)]
    assert local(costs, round_ms=1.0).subset == (0, 1, 2)
    assert local(costs, round_ms=1.0).best == pytest.approx(2100.0 * 0.97)


@pytest.mark.parametrize(("round_ms", "share"), [(10.0, 0.03), (640.0, 0.5), (1920.0, 0.75)])
def test_a_round_that_the_longest_window_cannot_hide_costs_its_share(round_ms: float, share: float) -> None:
    found = local([Cost(0, 1.0), Cost(0, 0.5)], round_ms, max_anchor=10)  # 10 slots of the slowest are 640 ms
    assert found.together == pytest.approx(3000.0 * (1.0 - share))
    assert (advice(found, ["cpu", "cpu"]) == []) == (share < 0.3)


def test_rounds_too_long_to_pay_name_the_single_device() -> None:
    found = local([Cost(0, 2.0), Cost(0, 1.0)], round_ms=1e4, max_anchor=10)
    assert found.subset == (1,)
    (text,) = advice(found, ["cpu@0.4", "cpu"])
    assert text is not None
    assert "use devices='cpu'" in text


def test_a_slow_device_makes_windows_long_and_rounds_cheap() -> None:
    """The slowest device sets the window: without it windows are shorter, and rounds cost a larger part."""
    costs = [Cost(0, 0.1), Cost(0, 0.1), Cost(0, 10.0)]
    found = local(costs, round_ms=64.0, max_anchor=10)
    assert found.subset == (0, 1, 2)
    without = local(costs[:2], round_ms=64.0, max_anchor=10)
    assert found.together > without.together


def test_the_best_local_subset_is_never_slower_than_all_or_one() -> None:
    rng = random.Random(1)
    for ranks in (2, 3, 5, 12):
        for _ in range(20):
            costs = [Cost(rng.uniform(0, 5), rng.uniform(0.05, 5)) for _ in range(ranks)]
            found = local(costs, round_ms=rng.uniform(0, 1000), max_anchor=rng.randint(1, 50))
            assert found.best >= found.together * (1 - 1e-9)
            assert found.best >= found.best_single * (1 - 1e-9)
