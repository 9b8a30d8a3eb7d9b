import random

import pytest

from uneven.policy.finish import Cost
from uneven.policy.subset import advice, forecast


def test_a_large_job_pays_and_nothing_is_said() -> None:
    found = forecast([Cost(1, 1), Cost(2.5, 2.5)], 64, sum_ms=2.0)
    assert found.pays
    assert found.subset == (0, 1)
    assert found.together == pytest.approx(1e3 * 64 / 49.5, rel=0.03)
    assert advice(found, ["cpu", "cpu@0.4"]) is None


def test_a_small_job_names_the_single_device() -> None:
    found = forecast([Cost(0.5, 0.01), Cost(1.2, 0.025)], 128, sum_ms=3.0)
    assert not found.pays
    text = advice(found, ["cpu", "cpu@0.4"])
    assert text is not None
    assert "use devices='cpu'" in text


def test_one_useless_device_among_good_ones_is_named_by_leaving_it_out() -> None:
    found = forecast([Cost(0, 1.0), Cost(0, 1.0), Cost(0, 1.0), Cost(500, 1)], 96, sum_ms=1.0)
    assert found.pays
    assert found.subset == (0, 1, 2)


def test_the_best_subset_is_never_slower_than_all_or_one() -> None:
    rng = random.Random(0)
    for ranks in (2, 3, 5, 12):
        for _ in range(50):
            costs = [Cost(rng.uniform(0, 5), rng.uniform(0.05, 5)) for _ in range(ranks)]
            found = forecast(costs, 8 * ranks, sum_ms=rng.uniform(0, 20))
            assert found.best >= found.together * (1 - 1e-9)
            assert found.best >= found.best_single * (1 - 1e-9)
