"""The simulation against pairs of devices that were measured: two slices of a GPU, two CPUs; figures of docs/log.md."""

import pytest

from uneven.simulate.cluster import Cluster, Job, Policy, RankKind
from uneven.simulate.links import Link
from uneven.simulate.simulation import simulate

# ResNet-20 at 128 with captured steps on cuda:0%60,cuda:0%24: samples/s of each slice alone, what a round took of the
# fast one's own time, and the transport of its host sums: 0.275 ms for 4 kB, 9.5 ms for 100 MB.
SPEEDS, ROUND_MS, PARAM_BYTES = (31_430.0, 17_030.0), 1.7, 1_100_000
SHARED_MEMORY = Link(100.0 / (9.5e-3 - 0.275e-3), 0.275 / 2)
MEASURED: dict[Policy, float] = {"balanced": 0.929, "cadence": 0.961, "async": 0.982}


@pytest.mark.parametrize("policy", MEASURED)
def test_two_slices_of_a_gpu_are_as_efficient_as_measured(policy: Policy) -> None:
    fixed_ms = 0.3  # of a step of 4 and 7.5 ms; not measured, and worth 0.004 at most
    kinds = tuple(
        RankKind(f"slice {place}", fixed_ms, 1e3 / speed - fixed_ms / 128, jitter=0.02, round_ms=ROUND_MS)
        for place, speed in enumerate(SPEEDS)
    )
    job = Job(samples_per_epoch=150_000, batch_size=128, param_bytes=PARAM_BYTES)
    found = simulate(Cluster(kinds, (0, 0), SHARED_MEMORY), job, policy)
    assert found.efficiency == pytest.approx(MEASURED[policy], abs=0.03)


# LeNet at 256 on cpu,cpu@0.4, by tools/simulate_against_real.py: samples/s of each device alone beside the measured
# efficiency, the fixed part of a step, half of a sum's time, and the efficiency. A round took 0.8 ms of a rank's time.
CPU_PAIR: dict[Policy, tuple[tuple[float, float], float, float]] = {
    "equal": ((6481.0, 2334.0), 5.12, 0.477),
    "sync": ((6295.0, 2415.0), 1.08, 0.528),
    "balanced": ((7091.0, 2003.0), 1.08, 0.976),
    "cadence": ((6882.0, 2103.0), 1.08, 0.968),
    "async": ((7062.0, 2576.0), 1.08, 0.986),
}
FIXED_PARTS = (0.293, 0.169)  # of a step of 256 samples, from those of 128 and 512


@pytest.mark.parametrize("policy", CPU_PAIR)
def test_two_cpus_are_as_efficient_as_measured(policy: Policy) -> None:
    speeds, delay_ms, efficiency = CPU_PAIR[policy]
    kinds = tuple(
        RankKind(f"cpu {place}", part * 256e3 / speed, (1.0 - part) * 1e3 / speed, jitter=0.03, round_ms=0.8)
        for place, (speed, part) in enumerate(zip(speeds, FIXED_PARTS, strict=True))
    )
    job = Job(samples_per_epoch=500_000, batch_size=256)
    found = simulate(Cluster(kinds, (0, 0), Link(1e9, delay_ms)), job, policy)
    assert found.efficiency == pytest.approx(efficiency, abs=0.03)
