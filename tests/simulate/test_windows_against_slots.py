"""Whole windows against slots one by one: the simulation of tests/policy has every slot, claim and merge."""

import pytest

from tests.policy import cluster as slots
from tests.policy.simulation import Simulation
from uneven.policy.windows import LocalSGDConfig
from uneven.simulate.cluster import Cluster, Job, RankKind
from uneven.simulate.links import Link
from uneven.simulate.simulation import simulate

SHORT = "a gap of 2.5"
CLUSTERS = {
    SHORT: ([40.0, 100.0], 1500, 5.0),
    "equal": ([50.0, 50.0, 50.0], 1500, 5.0),
    "a slow sum": ([40.0, 100.0], 3000, 400.0),
    "eight of three kinds": ([20.0] * 4 + [33.0] * 2 + [70.0] * 2, 4000, 20.0),
    "one far slower": ([20.0, 20.0, 200.0], 3000, 10.0),
}
LONGER = [pytest.param(name, marks=pytest.mark.soak) for name in CLUSTERS if name != SHORT]


@pytest.mark.parametrize("is_async", [False, True], ids=["cadence", "async"])
@pytest.mark.parametrize(
    "name", [SHORT, *(pytest.param(one, marks=pytest.mark.soak) for one in CLUSTERS if one != SHORT)]
)
def test_a_window_at_a_time_is_as_fast_as_slot_by_slot(name: str, is_async: bool) -> None:
    slot_ms, total, transfer_ms = CLUSTERS[name]
    one_by_one = slots.Cluster(slot_ms, total, jitter=0.05, transfer_ms=transfer_ms, touch_ms=0.5, epoch=total // 2)
    exact = Simulation(one_by_one, LocalSGDConfig(is_async=is_async), list(slot_ms)).run().efficiency
    kinds = tuple(RankKind(f"{ms:g} ms", 0.0, ms / 64, jitter=0.05 / 3**0.5, round_ms=1.0) for ms in slot_ms)
    cluster = Cluster(kinds, (0,) * len(kinds), Link(1e9, transfer_ms / 4))  # two sums of two messages each
    job = Job(samples_per_epoch=64 * total // 2, batch_size=64, epochs=2)
    found = simulate(cluster, job, "async" if is_async else "cadence").efficiency
    assert found == pytest.approx(exact, abs=0.015)
