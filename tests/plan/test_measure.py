"""What the ranks of a probe told becomes one record."""

from typing import Any

import pytest

from uneven.hardware.device import parse_devices
from uneven.plan.measure import assemble
from uneven.plan.probe import JobProbe, Probe


def row(device: str, factor: float | None) -> dict[str, Any]:
    exact = {"speed": 500.0, "steps": 10, "samples": 640, "factor": factor, "longest_ms": 2.0, "shares": [128, 0]}
    costs = {"fixed_ms": 1.0, "sample_ms": 0.1, "jitter": 0.0, "at_once": 900.0, "alone": 950.0}
    return {"device": device, "threads": 1, "cap": None, "sum_ms": 0.1, "latency_ms": 0.1, "exact": exact, **costs}


def assembled(*factors: float | None) -> Probe:
    devices = parse_devices(",".join(["cpu"] * len(factors)))
    rows = [row("cpu", factor) for factor in factors]
    return assemble(JobProbe(samples_per_epoch=6400, batch_size=64), rows, [], devices, 1.0)


def test_a_rank_that_had_no_share_of_the_joint_steps_is_slowed_down_like_the_others() -> None:
    """Its own time over that of no samples was a factor of 120, and predicted 28 s for what took 0.3."""
    assert [rank.exact_factor for rank in assembled(1.1, None, 1.3).ranks] == pytest.approx([1.1, 1.2, 1.3])
    assert [rank.exact_factor for rank in assembled(None, None).ranks] == [1.0, 1.0]
