"""The advice: what is taken from the predictions, and the sentence that gives the reason."""

from dataclasses import replace

import pytest

from tests.plan.probes import JOB, pair, rank
from uneven.plan.advise import Advice, advise, notes
from uneven.plan.predict import ALONE, predict
from uneven.plan.probe import ExactProbe, Probe, SoloProbe


def advice_of(probe: Probe) -> Advice:
    return advise(probe, predict(probe))


def test_an_exact_policy_is_preferred_within_a_few_percent() -> None:
    advice = advice_of(pair())
    assert (advice.policy, advice.devices) == ("balanced", ("cpu", "cpu@0.4"))
    assert "exact steps" in advice.reason
    assert "the fastest device alone (cpu)" in advice.reason


def test_a_local_policy_is_taken_where_it_is_clearly_faster() -> None:
    slow_sums = ExactProbe(policy="balanced", speed=0.0, overhead_ms=12.0, shares=(92, 36))
    advice = advice_of(pair(exact=slow_sums))
    assert advice.policy in ("cadence", "async")
    assert "balanced would give" in advice.reason
    assert "and exact steps" in advice.reason
    only_exact = advice_of(pair(exact=slow_sums, job=replace(JOB, candidates=("sync", "balanced"))))
    assert only_exact.policy == "balanced"


def test_one_device_where_the_job_is_too_small() -> None:
    advice = advice_of(pair(job=replace(JOB, samples_per_epoch=2_000, epochs=1)))
    assert advice.is_one_device
    assert advice.devices == ("cpu",)
    assert "starting the processes alone takes 4.0 s" in advice.reason


def test_one_device_where_the_link_is_too_slow() -> None:
    slow = ExactProbe(policy="balanced", speed=0.0, overhead_ms=80.0, shares=(92, 36))
    probe = pair(exact=slow, job=replace(JOB, candidates=("sync", "balanced")))
    advice = advice_of(probe)
    assert (advice.policy, advice.devices) == (ALONE, ("cpu",))
    assert "would be 0." in advice.reason
    assert advice_of(replace(probe, start_s=400.0)).reason == advice.reason  # of training, whatever the start takes


def test_one_device_where_the_steps_of_several_are_larger() -> None:
    """Two devices are faster, but train twice the samples in as many steps."""
    advice = advice_of(pair(job=replace(JOB, steps=100, candidates=("sync", "balanced"))))
    assert advice.is_one_device
    assert advice.reason.endswith("where a step has more samples")


def test_one_device_within_noise() -> None:
    solos = (SoloProbe(device="cpu", threads=2, speed=2200.0), SoloProbe(device="cpu@0.4", threads=2, speed=880.0))
    assert advice_of(pair(solos=solos)).is_one_device
    needed = pair(solos=solos, job=replace(JOB, min_ranks=2))
    assert not advice_of(needed).is_one_device


def test_a_device_that_adds_nothing_is_left_out() -> None:
    ranks = (rank("cuda:0", 0.5), rank("cuda:1", 0.5), rank("cpu", 60.0, 400.0))
    advice = advice_of(pair(ranks=ranks, solos=()))
    assert advice.devices == ("cuda:0", "cuda:1")
    assert " on 2 of 3 devices: " in advice.reason


def test_the_only_device_is_taken() -> None:
    probe = pair(ranks=(rank("cpu", 0.5),), solos=(), exact=None, local=None)
    assert advice_of(probe).reason == "one device, cpu: it is the only one"


def test_it_is_told_where_other_programs_used_the_cores() -> None:
    quiet = pair()
    assert not any("idle" in line for line in notes(quiet, predict(quiet)))
    assert any("idle" in line for line in notes(pair(is_disturbed=True), predict(quiet)))


@pytest.mark.parametrize("epochs", [1, 20])
def test_advice_is_one_of_the_predictions(epochs: int) -> None:
    probe = pair(job=replace(JOB, epochs=epochs))
    advice = advice_of(probe)
    assert any((one.policy, one.devices) == (advice.policy, advice.devices) for one in predict(probe))
