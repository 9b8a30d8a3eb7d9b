"""A probe of a loop of one's own is made from what short runs of the script have left: timeline and log."""

from dataclasses import replace

import pytest

from tests.plan.probes import JOB, pair
from uneven.config import resolve
from uneven.hardware.device import parse_devices
from uneven.plan.own_loop import Stretch, assemble, with_caps
from uneven.plan.plan import plan_from

DEVICES = parse_devices("cpu,cpu@0.4")
# 40 and 100 ms a batch of 64, of which 4 and 10 are fixed. Balanced gave 92 and 36 samples, and a sum took 2 ms.
JOINT = Stretch(
    seconds=5.79,
    samples=[9200, 3600],
    steps=[100, 100],
    compute_s=[5.575, 6.0625 - 0.5],
    rounds=[],
    start_s=3.0,
)
ROUNDS = Stretch(
    seconds=6.0,
    samples=[150 * 64, 60 * 64],
    steps=[150, 60],
    compute_s=[6.0, 6.0],
    rounds=[{"wait_ms": 1.0, "transfer_ms": 2.0, "latency_ms": 2.5}] * 6,
    start_s=3.0,
)
ALONE = Stretch(seconds=2.0, samples=[3200], steps=[50], compute_s=[2.0], rounds=[], start_s=3.0)


def test_costs_come_from_steps_of_both_kinds() -> None:
    job = replace(JOB, samples_per_epoch=64_000)
    probe = assemble(job, DEVICES, JOINT, "balanced", ROUNDS, "cadence", {"cpu": ALONE})
    fast, slow = probe.ranks
    assert (fast.fixed_ms, fast.sample_ms) == (pytest.approx(4.0, abs=0.5), pytest.approx(0.5625, rel=0.02))
    assert (fast.slot_ms, slow.slot_ms) == (pytest.approx(40.0), pytest.approx(100.0))
    assert fast.round_ms == pytest.approx(0.5)
    assert probe.local is not None
    assert probe.local.average_ms == pytest.approx(1.5)
    assert [(solo.device, solo.speed) for solo in probe.solos] == [("cpu", 1600.0), ("cpu@0.4", 640.0)]
    plan = plan_from(probe, {})
    balanced = plan.prediction("balanced", ("cpu", "cpu@0.4"))
    assert balanced is not None
    assert balanced.samples_per_s == pytest.approx(JOINT.speed, rel=0.03)


def test_without_local_policies_nothing_is_known_of_rounds() -> None:
    job = replace(JOB, candidates=("sync", "balanced"))
    probe = assemble(job, DEVICES, JOINT, "balanced", None, None, {})
    assert probe.local is None
    assert {one.policy for one in plan_from(probe, {}).predictions} == {"sync", "balanced", "equal", "alone"}


def test_what_memory_cap_allows_is_part_of_the_probe() -> None:
    settings = {"batch_size": 8, "epochs": 1, "policy": "balanced", "devices": "cpu,cpu@0.4"}
    for cap, found in (((48, 24), [48, 24]), (32, [32, 32]), (None, [None, None])):
        assert [rank.cap for rank in with_caps(pair(), resolve({**settings, "memory_cap": cap})).ranks] == found
