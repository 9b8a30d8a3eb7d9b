"""What must hold in every simulated run, whatever the cluster."""

from dataclasses import replace
from functools import reduce
from itertools import pairwise
from math import fsum, inf
from operator import add
from statistics import fmean, pstdev

import pytest

from tests.simulate.clusters import FAST, FREE, mixed, pair
from uneven.errors import InputError
from uneven.policy.exact import Balanced
from uneven.policy.round_report import RoundReport
from uneven.policy.windows import Windows
from uneven.simulate.cluster import POLICIES, Cluster, Job, Policy, RankKind
from uneven.simulate.links import Link
from uneven.simulate.simulation import simulate
from uneven.simulate.tally import STATES

JOB = Job(samples_per_epoch=6001, batch_size=64, epochs=2)
LAN = Link(110.0, 0.3)


def stormy_cluster(calm: Cluster) -> Cluster:
    return replace(calm, failures_per_hour=900.0, joins_per_hour=900.0, settle_s=0.3)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_sample_is_trained_once(policy: Policy) -> None:
    for cluster in (pair(), mixed(LAN), replace(mixed(LAN), slowdowns_per_hour=400.0, slowdown_factor=20.0)):
        found = simulate(cluster, replace(JOB, param_bytes=10**6), policy)
        assert found.samples == 2 * 6001
        assert sum(found.shares) == pytest.approx(1.0)
        assert all(sum(rank.values()) == pytest.approx(1.0) and set(rank) == set(STATES) for rank in found.busy)
        assert all(part >= 0.0 for rank in found.busy for part in rank.values())


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_devices_with_free_links_lose_nothing(policy: Policy) -> None:
    found = simulate(Cluster((FAST,) * 8, (0,) * 8, FREE), replace(JOB, samples_per_epoch=64 * 800), policy)
    assert 0.985 < found.efficiency <= 1.0 + 1e-9
    assert max(found.shares) - min(found.shares) < 0.01


def test_equal_batches_on_a_gap_of_2_5_reach_what_the_readme_says() -> None:
    job = replace(JOB, samples_per_epoch=32_000)
    found = {policy: simulate(pair(), job, policy) for policy in POLICIES}
    assert found["equal"].efficiency == pytest.approx(0.571, abs=0.01)
    assert "the busiest is rank 1 (slow)" in found["equal"].limits
    for policy in ("balanced", "cadence", "async"):
        assert found[policy].efficiency > 0.97
        assert found[policy].shares[0] == pytest.approx(100 / 140, abs=0.01)


@pytest.mark.parametrize("policy", POLICIES)
def test_delay_and_bytes_never_help(policy: Policy) -> None:
    job = replace(JOB, param_bytes=4 * 10**6)
    links = [Link(1e6, 0.0), Link(1e6, 5.0), Link(1000.0, 5.0), Link(100.0, 5.0), Link(100.0, 50.0)]
    seconds = [simulate(mixed(link, jitter=0.0), job, policy).seconds for link in links]
    # More slots a window may fit an epoch better: whole counts are worth a few per cent.
    assert all(later > 0.97 * sooner for sooner, later in pairwise(seconds))
    assert seconds[-1] > 1.05 * seconds[0]


def test_a_link_that_limits_is_named() -> None:
    job = replace(JOB, param_bytes=10**8)
    assert "the link between machines" in simulate(mixed(Link(10.0, 1.0)), job, "balanced").limits
    assert "inside machines" in simulate(pair(Link(10.0, 0.0)), job, "sync").limits


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_run_and_another_seed_another(policy: Policy) -> None:
    cluster, job = replace(mixed(LAN), failures_per_hour=500.0, joins_per_hour=500.0), replace(JOB, param_bytes=10**6)
    first = simulate(cluster, job, policy)
    assert first == simulate(cluster, job, policy)
    assert first.seconds != simulate(replace(cluster, seed=2), job, policy).seconds


def test_failures_and_joins_are_counted_and_cost_time() -> None:
    job = replace(JOB, samples_per_epoch=40_001, param_bytes=10**6)
    for policy in POLICIES:
        calm = simulate(mixed(LAN), job, policy)
        stormy = simulate(stormy_cluster(mixed(LAN)), job, policy)
        assert stormy.samples == 80_002
        assert stormy.failures > 0
        assert stormy.joins > 0
        assert stormy.trained_again > 0
        assert stormy.efficiency < calm.efficiency
        assert stormy.mean("settling") > 0.0
        assert sum(stormy.shares) == pytest.approx(1.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_ranks_that_join_are_of_a_kind_that_is_there(policy: Policy) -> None:
    found = simulate(pair(joins_per_hour=3600.0, settle_s=0.1), JOB, policy)
    assert found.joins > 0
    assert len(found.kinds) == len(found.shares) == len(found.busy) == 2 + found.joins
    assert found.kinds[:2] == ("fast", "slow")
    assert set(found.kinds) == {"fast", "slow"}


def compute_ms(job: Job, jitter: float, policy: Policy) -> list[float]:
    """What one device alone, with 1 ms a sample, computes in each window."""
    found = simulate(Cluster((RankKind("alone", 0.0, 1.0, jitter),), (0,), FREE), job, policy)
    assert all(part >= 0.0 for part in found.busy[0].values())
    return [1e3 * (span.end_s - span.start_s) for span in found.lanes if span.state == "compute"]


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_slot_that_is_mostly_missing_takes_the_time_of_its_samples(policy: Policy) -> None:
    """The missing 990 ms without their jitter were longer than many a drawn slot: time went backwards."""
    spent = compute_ms(Job(samples_per_epoch=10, batch_size=1000, epochs=100), 0.1, policy)
    assert len(spent) == 100
    assert fmean(spent) == pytest.approx(10.0, rel=0.05)
    assert min(spent) > 6.0


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_the_jitter_of_a_window_is_that_of_the_slots_it_has(policy: Policy) -> None:
    """An epoch of one slot ends every window after it, however many slots the policy would give one."""
    spent = compute_ms(Job(samples_per_epoch=100, batch_size=100, epochs=400), 0.2, policy)
    assert len(spent) == 400
    assert pstdev(spent) / fmean(spent) == pytest.approx(0.2, rel=0.15)


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_rank_reports_the_time_of_the_samples_it_has_trained(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short slot that was reported as a full one would look slow to the controller."""
    noted: list[RoundReport] = []
    inner = Windows.note
    monkeypatch.setattr(Windows, "note", lambda self, reports: noted.extend(reports) or inner(self, reports))
    simulate(Cluster((FAST,), (0,), FREE), Job(samples_per_epoch=650, batch_size=64, epochs=3), policy)
    trained = [report for report in noted if report.samples]
    assert any(report.samples % 64 for report in trained)
    for report in trained:
        assert report.busy_ms / report.samples == pytest.approx(FAST.sample_ms)


def test_the_controllers_are_those_of_real_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[str] = []
    for controller in (Balanced, Windows):
        inner = controller.note

        def note(self: object, *values: object, inner: object = inner, name: str = controller.__name__) -> object:
            noted.append(name)
            return inner(self, *values)  # type: ignore[operator]

        monkeypatch.setattr(controller, "note", note)
    rounds = sum(simulate(pair(), JOB, policy).rounds for policy in ("balanced", "cadence", "async"))
    assert len(noted) == rounds
    assert set(noted) == {"Balanced", "Windows"}


def test_balanced_leaves_out_what_does_not_help() -> None:
    useless = RankKind("useless", 5000.0, 1.0)
    found = simulate(Cluster((FAST, useless), (0, 0), FREE), JOB, "balanced")
    assert found.shares[1] < 0.01
    assert found.busy[1]["idle"] > 0.5


@pytest.mark.parametrize("policy", ["balanced", "cadence"])
def test_fixed_shares_are_kept_whatever_the_speeds(policy: Policy) -> None:
    job = replace(JOB, samples_per_epoch=64 * 400)
    found = simulate(pair(), replace(job, shares=(3.0, 1.0)), policy)
    assert found.shares == (pytest.approx(0.75, abs=0.01), pytest.approx(0.25, abs=0.01))
    even = simulate(pair(), replace(job, shares=(1.0, 1.0)), policy)
    assert even.efficiency == pytest.approx(simulate(pair(), job, "sync").efficiency, abs=0.01)
    nothing = simulate(pair(), replace(job, shares=(1.0, 0.0)), policy)
    assert nothing.shares == (1.0, 0.0)


@pytest.mark.parametrize("policy", ["balanced", "cadence"])
def test_ranks_that_are_left_keep_their_fixed_shares(policy: Policy) -> None:
    three = replace(Cluster((FAST,) * 3, (0,) * 3, FREE), failures_per_hour=1e5, settle_s=0.1, seed=3)
    found = simulate(three, replace(JOB, epochs=20, shares=(2.0, 1.0, 1.0)), policy)
    assert found.failures == 2
    assert found.samples == 20 * 6001


def test_memory_bounds_the_shares_of_balanced() -> None:
    assert simulate(pair(), replace(JOB, caps=(70, 128)), "balanced").counts == (70, 58)
    assert simulate(pair(), replace(JOB, caps=(10, 10)), "balanced").counts == simulate(pair(), JOB, "balanced").counts


def test_efficiency_over_time_and_lanes_cover_the_run() -> None:
    found = simulate(mixed(LAN), replace(JOB, samples_per_epoch=60_000, param_bytes=10**6), "balanced")
    assert found.over_time[-1][0] == pytest.approx(found.seconds)
    assert 20 <= len(found.over_time) <= 130
    assert {span.rank for span in found.lanes} == set(range(6))
    for rank in range(6):
        spans = [span for span in found.lanes if span.rank == rank]
        assert all(one.end_s <= two.start_s + 1e-9 for one, two in pairwise(spans))


def test_a_run_may_be_cut_off_and_its_time_per_epoch_stays() -> None:
    job = replace(JOB, samples_per_epoch=60_000, epochs=50)
    for policy in POLICIES:
        hour = simulate(mixed(LAN), job, policy, max_hours=0.01)
        assert 36.0 <= hour.seconds < 60.0
        assert hour.samples < 50 * 60_000


@pytest.mark.parametrize("policy", POLICIES)
def test_settling_that_never_ends_is_ended_by_the_bound(policy: Policy) -> None:
    """Every two seconds two things happened, and each took two seconds: the time of the next had always come."""
    found = simulate(pair(failures_per_hour=1800.0, joins_per_hour=1800.0, settle_s=2.0), JOB, policy, max_hours=0.01)
    assert found.seconds == pytest.approx(36.0)
    assert found.mean("settling") > 0.8
    assert found.limits.startswith("failures and joins: ")
    assert found.limits.endswith(f"settling after {found.failures + found.joins} of them")


def test_an_epoch_of_which_no_sample_counts_has_no_time() -> None:
    """Plain DDP starts again from the epoch's beginning after every failure."""
    job = replace(JOB, samples_per_epoch=10**6)
    found = simulate(pair(failures_per_hour=1800.0, joins_per_hour=1800.0), job, "equal", max_hours=0.01)
    assert (found.samples, found.seconds_per_epoch) == (0, inf)


def test_a_rank_counts_for_the_time_that_it_was_there() -> None:
    found = simulate(pair(joins_per_hour=360.0, settle_s=1.0), replace(JOB, epochs=4), "sync")
    assert found.joins > 0
    assert found.there_s[:2] == (pytest.approx(found.seconds),) * 2
    assert found.there_s[-1] < 0.9 * found.seconds
    spent_s = fsum(busy["settling"] * there_s for busy, there_s in zip(found.busy, found.there_s, strict=True))
    assert found.mean("settling") == pytest.approx(spent_s / fsum(found.there_s))
    assert found.mean("settling", [0]) == pytest.approx(found.joins * 1.0 / found.seconds)
    assert found.mean("settling") != pytest.approx(fmean(busy["settling"] for busy in found.busy))


def test_speeds_are_summed_alike_by_every_version_of_python() -> None:
    """The builtin sum of floats rounds once from Python 3.12 on, and after every number before."""
    kinds = tuple(RankKind(f"kind {number}", 0.0, 0.1 + 0.7 * number) for number in range(7))
    speeds = [kind.speed(64) for kind in kinds]
    assert fsum(speeds) != reduce(add, speeds)
    assert Cluster(kinds, (0,) * 7, FREE).speed(64) == fsum(speeds)


def test_one_rank_alone_loses_nothing() -> None:
    for policy in POLICIES:
        assert simulate(Cluster((FAST,), (0,), FREE), JOB, policy).efficiency > 0.99


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(InputError, match="policy='fast' is not one of equal"):
        simulate(pair(), JOB, "fast")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="sample_ms=0"):
        RankKind("x", 1.0, 0.0)
    with pytest.raises(InputError, match="needs the link between"):
        Cluster((FAST, FAST), (0, 1), FREE)
    with pytest.raises(InputError, match="one entry for each of the 2 ranks"):
        Cluster((FAST, FAST), (0,), FREE)
    with pytest.raises(InputError, match=r"shares=.* one entry for each of the 2 ranks"):
        simulate(pair(), replace(JOB, shares=(1.0, 1.0, 1.0)), "balanced")
    with pytest.raises(InputError, match=r"caps=.* with joins_per_hour"):
        simulate(pair(joins_per_hour=1.0), replace(JOB, caps=(8, 8)), "balanced")
    with pytest.raises(InputError, match="one of them above 0"):
        replace(JOB, shares=(0.0, 0.0))
    with pytest.raises(InputError, match=r"caps=.* at least 1 each"):
        replace(JOB, caps=(0, 8))
    with pytest.raises(InputError, match="max_hours=0"):
        simulate(pair(), JOB, "sync", max_hours=0)
