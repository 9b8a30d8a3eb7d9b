"""Random numbers by comparisons and + - * / alone, and golden numbers that every CPU must give."""

import math

import pytest

from tests.simulate.clusters import mixed
from uneven.simulate.cluster import Job, Policy
from uneven.simulate.links import Link
from uneven.simulate.members import Draws
from uneven.simulate.simulation import simulate


def test_normal_numbers_have_their_mean_and_deviation() -> None:
    drawn = Draws(0, "x").normals(20_000)
    mean = math.fsum(drawn) / len(drawn)
    assert abs(mean) < 0.02
    assert math.fsum(value * value for value in drawn) / len(drawn) == pytest.approx(1.0, abs=0.02)
    assert max(map(abs, drawn)) <= 3.1


def test_exponential_numbers_have_their_distribution() -> None:
    draws = Draws(1, "x")
    drawn = sorted(draws.exponential() for _ in range(20_000))
    assert math.fsum(drawn) / len(drawn) == pytest.approx(1.0, abs=0.03)
    for at in (0.5, 1.0, 2.0, 3.0):
        assert sum(value > at for value in drawn) / len(drawn) == pytest.approx(math.exp(-at), abs=0.015)


def test_streams_of_another_seed_or_name_differ() -> None:
    assert Draws(0, "x").normals(8) == Draws(0, "x").normals(8)
    assert len({tuple(Draws(seed, name).normals(8)) for seed in (0, 1) for name in "xy"}) == 4


GOLDEN: dict[Policy, float] = {
    "equal": 3.5558996137029113,
    "sync": 3.3139602197635187,
    "balanced": 1.8122543959310766,
    "cadence": 1.4727399166161366,
    "async": 1.5152184311327788,
}


@pytest.mark.parametrize("policy", GOLDEN)
def test_a_run_takes_the_same_time_on_every_cpu(policy: Policy) -> None:
    job = Job(samples_per_epoch=6001, batch_size=64, epochs=2, param_bytes=10**6)
    assert simulate(mixed(Link(110.0, 0.3)), job, policy).seconds == pytest.approx(GOLDEN[policy], rel=1e-9)
