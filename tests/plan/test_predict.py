"""From recorded probes to predictions: figures that follow by hand from the costs, and what calibrates them."""

import json
from dataclasses import replace

import pytest

from tests.plan.probes import JOB, pair, rank, several
from uneven.plan.predict import ALONE, EQUAL, Prediction, predict, strategies
from uneven.plan.probe import ExactProbe, LocalProbe, Probe
from uneven.policy.finish import equal_finish, finish_ms


def of(found: list[Prediction], policy: str, *devices: str) -> Prediction:
    (one,) = (p for p in found if p.policy == policy and p.devices == (devices or ("cpu", "cpu@0.4")))
    return one


def test_the_policies_take_what_follows_from_the_costs() -> None:
    probe = pair()
    found = predict(probe)
    steps = 64_000 / 128
    assert of(found, "sync").seconds_per_epoch == pytest.approx(steps * 0.101, rel=0.01)
    assert of(found, EQUAL).seconds_per_epoch == pytest.approx(of(found, "sync").seconds_per_epoch)
    costs = [one.cost for one in probe.ranks]
    best_ms = finish_ms(costs, equal_finish(costs, 128))
    assert of(found, "balanced").seconds_per_epoch == pytest.approx(steps * (best_ms + 1.0) / 1e3, rel=0.02)
    speed = 64 / 0.040 + 64 / 0.100
    for policy in ("cadence", "async"):
        assert of(found, policy).efficiency == pytest.approx(1.0, abs=0.05)
        assert of(found, policy).samples_per_s == pytest.approx(speed, rel=0.05)
    assert of(found, "cadence").shares[0] == pytest.approx(2.5 / 3.5, abs=0.02)
    assert [one.seconds_per_epoch for one in found] == sorted(one.seconds_per_epoch for one in found)


def test_a_device_alone_has_all_cores() -> None:
    found = predict(pair())
    assert of(found, ALONE, "cpu").samples_per_s == 1700.0
    assert of(found, ALONE, "cpu").gain == 1.0
    assert of(found, "balanced").gain == pytest.approx(of(found, "balanced").samples_per_s / 1700.0)


def test_a_device_alone_is_at_least_as_fast_as_it_was_among_others() -> None:
    """A CPU that was disturbed while it was alone made two devices seem to gain more than both have."""
    slow = tuple(replace(solo, speed=0.5 * solo.speed) for solo in pair().solos)
    probe = pair(solos=slow)
    found = predict(probe)
    assert of(found, ALONE, "cpu").samples_per_s == probe.ranks[0].at_once
    assert of(found, ALONE, "cpu").gain == 1.0
    assert all(one.gain <= 1.41 for one in found)  # the second device has 0.4 of the first one's speed
    among = pair(solos=slow, ranks=(replace(probe.ranks[0], at_once=1900.0), probe.ranks[1]))
    assert of(predict(among), ALONE, "cpu").samples_per_s == 1900.0


@pytest.mark.parametrize("policy", ["balanced", "cadence"])
def test_shares_that_are_fixed_are_those_of_the_predictions(policy: str) -> None:
    """Predicted was a run by speed, which would not happen."""
    job = replace(JOB, candidates=("balanced", "cadence"), shares=(1.0, 1.0))
    found = of(predict(pair(job=job)), policy)
    assert found.shares == (pytest.approx(0.5, abs=0.01), pytest.approx(0.5, abs=0.01))
    assert found.efficiency < 0.75
    assert of(predict(pair(job=replace(job, shares=None))), policy).efficiency > 0.9


def test_fixed_shares_follow_the_subset_of_the_devices() -> None:
    job = replace(JOB, samples_per_epoch=6400, candidates=("balanced",), shares=(0.0, 3.0, 1.0))
    found = predict(replace(several(3), job=job))
    assert of(found, "balanced", "cuda:1", "cuda:2").shares[0] == pytest.approx(0.75, abs=0.01)
    assert of(found, "balanced", "cuda:0", "cuda:2").shares == (0.0, 1.0)
    nobody = predict(replace(several(3), job=replace(job, shares=(0.0, 0.0, 1.0))))
    assert ("cuda:0", "cuda:1") not in {one.devices for one in nobody}


def test_what_memory_holds_bounds_the_shares_of_balanced() -> None:
    ranks = tuple(replace(one, cap=cap) for one, cap in zip(pair().ranks, (35, None), strict=True))
    for accumulate, share in ((1, 35 / 128), (2, 70 / 128)):
        found = predict(pair(ranks=ranks, job=replace(JOB, accumulate=accumulate)))
        assert of(found, "balanced").shares[0] == pytest.approx(share, abs=0.01)
    assert of(predict(pair()), "balanced").shares[0] > 0.7


def test_measured_speeds_calibrate_all_policies_of_their_kind() -> None:
    exact = ExactProbe(policy="balanced", speed=1500.0, overhead_ms=1.0, shares=(92, 36))
    local = LocalProbe(policy="cadence", speed=1600.0, average_ms=1.0, anchor=4)
    plain, found = predict(pair()), predict(pair(exact=exact, local=local))
    assert of(found, "balanced").samples_per_s == pytest.approx(1500.0, rel=0.02)
    same = predict(pair(job=replace(JOB, anchor=4, max_anchor=4), local=local))
    assert of(same, "cadence").samples_per_s == pytest.approx(1600.0, rel=0.02)
    slower = of(found, "balanced").seconds_per_epoch / of(plain, "balanced").seconds_per_epoch
    assert of(found, "sync").seconds_per_epoch == pytest.approx(slower * of(plain, "sync").seconds_per_epoch)


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_what_rounds_cost_beyond_what_was_timed_of_them_is_part_of_every_round(policy: str) -> None:
    """Windows of a probe are short. A tenth of their time would be a hundredth of windows ten times as long."""
    slots_s = 4 * 0.1  # of the slowest rank, between two rounds
    speed = (64 / 0.040 + 64 / 0.100) * slots_s / (slots_s + 0.044)
    local = LocalProbe(policy="cadence", speed=speed, average_ms=1.0, anchor=4)
    plain, short, long = (
        of(predict(pair(job=replace(JOB, anchor=anchor, max_anchor=anchor), local=probed)), policy).seconds_per_epoch
        for anchor, probed in ((40, pair().local), (4, local), (40, local))
    )
    assert short / plain == pytest.approx(1.11, abs=0.03)
    assert long / plain == pytest.approx(1.01, abs=0.01)


def test_an_epoch_that_is_too_long_to_simulate_is_scaled() -> None:
    long = predict(pair(job=replace(JOB, samples_per_epoch=640_000_000)))
    short = predict(pair(job=replace(JOB, samples_per_epoch=640_000)))
    for policy in ("sync", "balanced", "cadence"):
        ratio = of(long, policy).seconds_per_epoch / of(short, policy).seconds_per_epoch
        assert ratio == pytest.approx(1000.0, rel=0.03)


def test_every_subset_of_few_devices_and_the_fastest_of_many() -> None:
    few = {one.ranks for one in predict(several(3))}
    assert few == {(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)}
    many = {one.ranks for one in predict(replace(several(6), job=replace(JOB, samples_per_epoch=6400)))}
    assert many == {*((place,) for place in range(6)), *(tuple(range(size)) for size in range(2, 7))}


def test_equal_devices_are_predicted_once() -> None:
    found = predict(pair(ranks=(rank("cpu", 0.5), rank("cpu", 0.5))))
    assert [one.devices for one in found if one.policy == ALONE] == [("cpu",)]


def test_only_policies_that_the_settings_allow_are_candidates() -> None:
    found = predict(pair(job=replace(JOB, candidates=("balanced",), min_ranks=2)))
    assert {one.policy for one in found} == {"balanced", EQUAL, ALONE}
    assert [one.policy for one in found if one.is_candidate] == ["balanced"]


def test_max_steps_ends_the_run_earlier() -> None:
    probe = pair(job=replace(JOB, steps=100))
    found = of(predict(probe), "sync")
    assert found.total_s == pytest.approx(4.0 + found.seconds_per_epoch * 100 * 128 / 64_000)
    alone = of(predict(probe), ALONE, "cpu")
    assert alone.total_s == pytest.approx(alone.seconds_per_epoch * 100 * 64 / 64_000)


def test_a_step_of_one_device_has_the_global_batch_too() -> None:
    """Advice by max_steps compared 100 steps of 256 samples with 100 of 64, and took one device."""
    probe = pair(job=replace(JOB, steps=100, global_batch_size=256, candidates=("sync", "balanced")))
    found = predict(probe)
    for one in (of(found, ALONE, "cpu"), of(found, "balanced")):
        start_s = 0.0 if one.policy == ALONE else 4.0
        assert one.total_s == pytest.approx(start_s + one.seconds_per_epoch * 100 * 256 / 64_000)


def test_the_memory_of_strategies_follows_that_of_the_devices() -> None:
    ranks = (rank("cuda:0", 0.5, memory_bytes=3 * 10**9), rank("cuda:1", 0.5, memory_bytes=10**9))
    held = {one.strategy: one.memory_bytes for one in strategies(pair(ranks=ranks))}
    assert held["ddp"] == (720_000, 720_000)
    assert held["zero1"] == (360_000 + 270_000, 360_000 + 90_000)
    assert held["zero2"] == (180_000 + 405_000, 180_000 + 135_000)
    assert held["fsdp"] == (540_000, 180_000)
    times = {one.strategy: one.seconds_per_epoch for one in strategies(pair())}
    assert times["ddp"] == times["zero1"] == pytest.approx(of(predict(pair()), "balanced").seconds_per_epoch)
    assert times["fsdp"] > times["ddp"]


def test_frozen_params_are_held_and_gathered_and_a_cpu_counts_with_a_part_of_its_memory() -> None:
    job = replace(JOB, gradient_bytes=JOB.param_bytes // 10, state_bytes=2 * JOB.param_bytes // 10)
    ranks = (rank("cuda:0", 0.5, memory_bytes=10**9), rank("cpu", 0.5, memory_bytes=8 * 10**9))
    found = {one.strategy: one for one in strategies(pair(job=job, ranks=ranks))}
    assert found["ddp"].memory_bytes == (234_000, 234_000)
    assert found["zero2"].memory_bytes == (180_000 + 18_000, 180_000 + 36_000)
    assert found["fsdp"].memory_bytes == (78_000, 156_000), "8 GB of the host count as 2"
    two = (ranks[0], *[replace(ranks[1], device=name) for name in ("cpu", "cpu@0.5")])
    held = {one.strategy: one.memory_bytes for one in strategies(pair(job=job, ranks=two))}
    assert held["fsdp"] == (78_000, 78_000, 78_000)


def test_a_probe_is_the_same_after_json() -> None:
    probe = pair(notes=("a note",))
    assert Probe.from_json(json.loads(json.dumps(probe.to_json()))) == probe
    fixed = pair(job=replace(JOB, shares=(5.0, 2.0), accumulate=2))
    assert Probe.from_json(json.loads(json.dumps(fixed.to_json()))) == fixed
    written = probe.to_json()
    del written["job"]["shares"], written["job"]["accumulate"]  # a key with a default may be missing
    assert Probe.from_json(written) == probe
    with pytest.raises(TypeError, match="has no usable ranks"):
        Probe.from_json({**written, "ranks": [{**written["ranks"][0], "fixed_ms": "4"}]})
    with pytest.raises(ValueError, match="version"):
        Probe.from_json({**probe.to_json(), "version": 0})
