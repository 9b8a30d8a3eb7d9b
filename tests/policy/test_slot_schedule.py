"""Ranks along the axis, on simulated clusters: nothing lost, nobody stuck, little waited, averages merged promptly."""

import random
from collections import deque
from dataclasses import replace
from statistics import fmean as mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policy.clusters import ASYNC, CADENCE, clusters
from tests.policy.simulation import Cluster, Outcome, Simulation
from uneven.policy.round_report import RoundReport
from uneven.policy.slot_schedule import SlotSchedule, first_free_slot
from uneven.policy.windows import LocalSGDConfig, Windows

POLICIES = pytest.mark.parametrize("config", [CADENCE, ASYNC], ids=["cadence", "async"])


def random_cluster(rng: random.Random, ranks: int, windows: int = 12) -> Cluster:
    """Gaps from 1 to 10; long enough for about so many windows."""
    gap = rng.choice([1.0, 1.5, 2.0, 2.5, 4.0, 10.0])
    slot_ms = [10.0, *(10.0 * rng.uniform(1.0, gap) for _ in range(ranks - 2)), 10.0 * gap]
    total = int(windows * 10 * max(slot_ms) * sum(1.0 / ms for ms in slot_ms))
    return Cluster(slot_ms, total, seed=rng.randrange(10**6))


def run(cluster: Cluster, config: LocalSGDConfig, max_staleness: int | None = None, hint: float = 1.0) -> Outcome:
    hints = [ms * (hint if rank % 2 else 1.0) for rank, ms in enumerate(cluster.slot_ms)]
    return Simulation(cluster, config, hints, max_staleness).run()


# Whatever the cluster (what must hold is checked in the simulation)


@given(
    clusters(), st.booleans(), st.sampled_from([1, 3, 10]), st.sampled_from([None, 0.3, 1.0, 3.0]), st.integers(0, 4)
)
def test_every_slot_is_trained_once_and_nobody_is_stuck(
    cluster: Cluster, is_async: bool, anchor: int, hint: float | None, max_staleness: int
) -> None:
    hints = None if hint is None else [ms * (hint if rank else 1.0) for rank, ms in enumerate(cluster.slot_ms)]
    outcome = Simulation(cluster, LocalSGDConfig(is_async=is_async, anchor=anchor), hints, max_staleness or None).run()
    assert outcome.most_lead <= (max_staleness or 10**6)
    assert outcome.claims <= cluster.total + cluster.ranks


@given(clusters(), st.booleans(), st.sampled_from([1, 3, 10]), st.integers(0, 4), st.booleans())
def test_streams_whose_ends_nobody_knows(
    cluster: Cluster, is_async: bool, anchor: int, max_staleness: int, hinted: bool
) -> None:
    """Every slot once, no slot of an epoch before all ranks have passed the last one, no rank stuck."""
    hints = list(cluster.slot_ms) if hinted else None
    config = LocalSGDConfig(is_async=is_async, anchor=anchor)
    Simulation(replace(cluster, hides_ends=True), config, hints, max_staleness or None).run()


@settings(max_examples=settings().max_examples // 2)
@given(clusters(), st.integers(1, 5))
def test_fixed_shares_go_the_same_way(cluster: Cluster, anchor: int) -> None:
    shares = tuple(float(rank % 3) for rank in range(1, cluster.ranks + 1))
    outcome = Simulation(cluster, LocalSGDConfig(anchor=anchor, shares=shares)).run()
    assert outcome.decisions == []


# A wish for an event: at a slot that nobody has passed when he learns of it (checked in the simulation)


@settings(max_examples=25, deadline=None)
@given(
    clusters(),
    st.booleans(),
    st.sampled_from([None, 1.0]),
    st.integers(0, 4),
    st.sets(st.integers(0, 12)),
    st.booleans(),
)
def test_a_wish_becomes_an_event_on_any_cluster(
    cluster: Cluster, is_async: bool, hint: float | None, max_staleness: int, wishes: set[int], freezes: bool
) -> None:
    cluster = replace(cluster, freeze=(0, 0.1, 2000.0) if freezes else None)
    hints = None if hint is None else list(cluster.slot_ms)
    config = LocalSGDConfig(is_async=is_async, anchor=3)
    outcome = Simulation(cluster, config, hints, max_staleness or None, wishes=wishes).run()
    dues = [one.due for one in outcome.rounds]
    assert outcome.requested <= set(dues), "an event without a round"
    if not is_async:
        assert [one.free for one in outcome.rounds] == dues, "in cadence it is the round's own slot"


@pytest.mark.parametrize("lookahead", [0, 4])
def test_the_slot_of_a_wish_is_few_windows_away_even_if_a_rank_stands_still(lookahead: int) -> None:
    slot_ms, config = [10.0, 25.0, 14.0], LocalSGDConfig(is_async=True, max_anchor=10)
    for rank, seed in ((0, 1), (1, 2), (2, 3)):
        cluster = Cluster(slot_ms, 1500, seed=seed, lookahead=lookahead, freeze=(rank, 0.03, 2000.0))
        outcome = run(cluster, config)
        ahead = [(one.free - one.due) / sum(one.counts) for one in outcome.rounds]
        assert 2.0 < sorted(ahead)[len(ahead) // 2] < 3.0
        assert max(ahead) < 4.5, "a rank that stood still enters late, when the others have claimed two windows more"
        wished = Simulation(cluster, config, list(slot_ms), wishes=range(0, 1000, 5)).run()
        assert len(wished.requested) > 3


def test_the_limit_costs_nothing() -> None:
    """A rank reaches it only where others went farther than its staleness lets it follow."""
    rng = random.Random(1)
    for lookahead in (0, 8):
        cluster = replace(random_cluster(rng, 4, 30), lookahead=lookahead)
        assert run(cluster, ASYNC).efficiency > 0.975


# Stopped at an event, and resumed by fresh ranks


def draw_stop(cluster: Cluster, place: int) -> int:
    """An event of the run: its end where it has no other."""
    stop = cluster.next_event(0)
    for _ in range(place):
        stop = cluster.next_event(stop)
    return stop


@settings(max_examples=30, deadline=None)
@given(clusters(), st.booleans(), st.sampled_from([None, 1.0]), st.integers(0, 4), st.integers(0, 3), st.integers(1, 4))
def test_a_resumed_run_trains_every_slot_once_on_any_number_of_ranks(
    cluster: Cluster, is_async: bool, hint: float | None, max_staleness: int, place: int, ranks: int
) -> None:
    cluster = replace(cluster, epoch=cluster.epoch or 20)
    config, stop = LocalSGDConfig(is_async=is_async, anchor=3), draw_stop(cluster, place)
    hints = None if hint is None else list(cluster.slot_ms)
    first = Simulation(cluster, config, hints, max_staleness or None, stop=stop).run()
    if stop == cluster.total:
        assert first.state["is_over"]
        return
    same = Simulation(cluster, config, hints, max_staleness or None, start=stop, state=first.state).run()
    assert same.rounds[0].due > stop
    assert same.state["rounds"] == first.state["rounds"] + len(same.rounds)
    other = replace(cluster, slot_ms=(cluster.slot_ms * 4)[:ranks], stop=None, change=None)
    hints = None if hint is None else list(other.slot_ms)
    Simulation(other, config, hints, max_staleness or None, start=stop).run()


def test_a_rank_that_is_left_out_when_a_run_is_resumed_counts_claims_like_the_others() -> None:
    """It began to count after the first round, so a slot that it claimed later was nobody's."""
    cluster = Cluster(
        [1.0, 2.5, 1.0, 1.0, 1.0, 1.0], 41, jitter=0.0, stop=(5, 0, 2000.0), claim_ms=0.0, epoch=3, short=1
    )
    cluster = replace(cluster, transfer_ms=0.01)
    config = LocalSGDConfig(is_async=True, anchor=3)
    state = Simulation(cluster, config, stop=12).run().state
    assert max(state["_probe_in"]) >= 0, "somebody is left out"
    Simulation(cluster, config, start=12, state=state).run()


@settings(max_examples=15, deadline=None)
@given(clusters(), st.integers(1, 5), st.integers(0, 3))
def test_with_fixed_shares_a_resumed_run_gives_every_rank_the_same_slots(
    cluster: Cluster, anchor: int, place: int
) -> None:
    cluster = replace(cluster, epoch=cluster.epoch or 20)
    shares = tuple(float(rank % 3) for rank in range(1, cluster.ranks + 1))
    config, stop = LocalSGDConfig(anchor=anchor, shares=shares), draw_stop(cluster, place)
    whole = Simulation(cluster, config).run()
    first = Simulation(cluster, config, stop=stop).run()
    if stop == cluster.total:
        return
    rest = Simulation(cluster, config, start=stop, state=first.state).run()
    for rank in range(cluster.ranks):
        joined = first.slots.get(rank, []) + rest.slots.get(rank, [])
        assert joined == whole.slots.get(rank, [])
    assert [one.due for one in first.rounds + rest.rounds] == [one.due for one in whole.rounds]
    assert rest.rounds[-1].print == whole.rounds[-1].print


@POLICIES
def test_a_large_cluster_with_fewer_slots_than_ranks_between_events(config: LocalSGDConfig) -> None:
    slot_ms = [10.0 + rank for rank in range(64)]
    run(Cluster(slot_ms, 130, epoch=50, lookahead=2), config)
    Simulation(Cluster(slot_ms, 130, epoch=50), config).run()


# Little waited


@pytest.mark.parametrize(
    ("ranks", "many"),
    [
        *((2, 10), (3, 8), (8, 3), (16, 1)),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in ((2, 30), (3, 20), (8, 8), (16, 2), (64, 1))),
    ],
)
@POLICIES
def test_efficiency_over_random_clusters(config: LocalSGDConfig, ranks: int, many: int) -> None:
    rng = random.Random(ranks)
    found = [run(random_cluster(rng, ranks), config).efficiency for _ in range(many)]
    if config.is_async:
        # What is lost: snapshots and claims (1 %), and at the end half a slot of the slowest of 120.
        assert mean(found) > 0.975
        assert min(found) > 0.96
    else:
        # Besides: the transfer, whole counts (up to half a slot of ten), and the noise of the slowest rank.
        assert mean(found) > 0.955
        assert min(found) > 0.93


@pytest.mark.parametrize("many", [1, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("trouble", "least_cadence", "least_async"),
    [
        ({"jitter": 0.2}, 0.94, 0.975),
        ({"spikes": 0.01}, 0.92, 0.975),
        ({"wander": 0.1}, 0.92, 0.975),
        ({"transfer_ms": 30.0}, 0.9, 0.96),
        ({"claim_ms": 0.5}, 0.96, 0.96),
        ({"lookahead": 8}, 0.96, 0.975),
        ({"epoch": 200, "short": 1}, 0.94, 0.94),
        ({"change": (0, 150, 2.0)}, 0.9, 0.975),  # two windows of fifteen with the old counts
        ({"change": (1, 150, 0.4)}, 0.93, 0.975),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_efficiency_in_trouble(trouble: dict[str, object], least_cadence: float, least_async: float, many: int) -> None:
    rng = random.Random(0)
    pairs = [replace(random_cluster(rng, ranks, 15), **trouble) for ranks in (2, 3, 6) * many]  # type: ignore[arg-type]
    assert mean([run(cluster, CADENCE).efficiency for cluster in pairs]) > least_cadence
    assert mean([run(cluster, ASYNC).efficiency for cluster in pairs]) > least_async


@pytest.mark.parametrize("hint", [None, 0.5, 0.7, 1.5, 3.0])
def test_wrong_hints_or_none_cost_little(hint: float | None) -> None:
    rng = random.Random(0)
    for config, least in ((CADENCE, 0.92), (ASYNC, 0.97)):
        found = []
        for _ in range(3):
            cluster = random_cluster(rng, 3, 20)
            outcome = Simulation(cluster, config).run() if hint is None else run(cluster, config, hint=hint)
            found.append(outcome.efficiency)
        assert mean(found) > least


def test_waiting_does_not_make_windows_longer() -> None:
    rng = random.Random(3)
    for trouble in ({"jitter": 0.3}, {"spikes": 0.03}, {"wander": 0.2}, {"stop": (0, 100, 2000.0)}):
        for _ in range(4):
            cluster = replace(random_cluster(rng, 3, 20), **trouble)
            assert max(one.anchor for one in run(cluster, CADENCE).rounds) <= 25.0


@pytest.mark.parametrize("seeds", [2, pytest.param(4, marks=pytest.mark.soak)])
@POLICIES
def test_a_slow_link_sets_the_anchor_once(config: LocalSGDConfig, seeds: int) -> None:
    for seed in range(seeds):
        cluster = Cluster([10.0, 14.0, 25.0], 7000, seed=seed, transfer_ms=40.0, jitter=0.1)
        outcome = run(cluster, config)
        anchors = [one.anchor for one in outcome.rounds]
        assert anchors == sorted(anchors)
        assert len(set(anchors[10:])) <= 2
        assert 15.0 < anchors[-1] < 90.0


# Averages are merged promptly


@pytest.mark.parametrize("lookahead", [0, 2, 8])
@pytest.mark.parametrize("lie", [1.0, 0.7, 1.3])
def test_averages_are_merged_within_two_slots_of_the_slowest_rank(lookahead: int, lie: float) -> None:
    rng = random.Random(lookahead)
    delays = []
    for ranks in (2, 3, 8, 2):
        cluster = random_cluster(rng, ranks)
        cluster.lookahead, cluster.claim_ms = lookahead, rng.choice([0.1, 0.3])
        cluster.lies = [lie if rank % 2 else 1.0 for rank in range(ranks)]  # the counts stay wrong for ever
        delays.append(mean(run(cluster, ASYNC).delays))
    assert max(delays) < 1.5
    assert mean(delays) < 1.1


def test_no_rank_goes_farther_ahead_than_it_may() -> None:
    for max_staleness in (1, 3, None):
        cluster = Cluster([10.0, 25.0], 2000, stop=(1, 700, 2000.0))
        outcome = run(cluster, ASYNC, max_staleness)
        assert outcome.most_lead == (max_staleness or 50)


@pytest.mark.parametrize("lookahead", [0, 8])
@pytest.mark.parametrize("rank", [0, 1])
def test_after_a_stop_rounds_do_not_come_in_a_burst(rank: int, lookahead: int) -> None:
    outcome = run(Cluster([10.0, 25.0], 3000, stop=(rank, 1000, 2000.0), lookahead=lookahead), ASYNC)
    periods_ms = sorted(outcome.periods_ms[:-2])  # the last ones are shortened by the end
    assert periods_ms[-1] > 2000.0
    # What a feed holds is old news after a stop: it may cost one early round, no more.
    assert periods_ms[1 if lookahead else 0] > 150.0
    assert outcome.efficiency > 0.9


# One schedule


def alone(total: int, event: int, hints: list[float], claimed: int = 0) -> tuple[Windows, SlotSchedule]:
    """Rank 0 of an async run in which others have claimed so much already and claim nothing more."""

    def claim(many: int) -> int:
        nonlocal claimed
        claimed += many
        return claimed - many

    windows = Windows(ASYNC, len(hints), 64, lambda slot: event if slot < event else total, hints)
    return windows, SlotSchedule(windows, 0, total, claim)


def test_a_claim_past_an_event_is_kept_until_it_is_passed() -> None:
    windows, slot_schedule = alone(40, 20, [10.0, 10.0], claimed=22)
    assert windows.due == windows.event == 20
    assert slot_schedule.next_slot == 22
    assert slot_schedule.hand() is None
    assert slot_schedule.is_due()
    slot_schedule.enter()
    windows.note([RoundReport(next_slot=22), RoundReport(next_slot=20)])
    slot_schedule.merged()
    assert windows.event == 40
    assert slot_schedule.hand() == 22


def test_a_claim_past_the_limit_is_kept_until_the_round_is_merged() -> None:
    """The others have merged and gone on, while this rank stood still between two slots."""
    windows, slot_schedule = alone(10_000, 10_000, [10.0, 10.0])
    while not slot_schedule.is_due():
        assert slot_schedule.hand() is not None
        slot_schedule.trained()
    limit = slot_schedule.set_limit()
    assert 40 < limit - windows.due < 60
    slot_schedule.enter()
    assert slot_schedule.hand() is not None
    slot_schedule.claim = lambda many: limit
    assert slot_schedule.hand() is None
    assert not slot_schedule.may_merge(has_arrived=False)
    slot_schedule.trained()
    assert slot_schedule.may_merge(has_arrived=False), "it waits for the average"
    reports = [RoundReport(next_slot=limit, limit=limit), RoundReport(next_slot=windows.due, limit=limit - 2)]
    assert first_free_slot(reports, windows.event) == limit
    assert first_free_slot(reports, limit - 5) == limit - 5, "an event that comes before it serves as well"
    windows.learn_event(limit + 3)
    windows.note(reports)
    slot_schedule.merged()
    assert windows.event == limit + 3
    assert slot_schedule.hand() == limit


def test_a_round_is_due_when_claims_have_come_to_it_whatever_the_feed_still_holds() -> None:
    windows, slot_schedule = alone(1000, 1000, [10.0, 10.0], claimed=17)
    assert windows.due == 20
    held = deque(slot_schedule.hand() for _ in range(3))
    assert list(held) == [17, 18, 19]
    assert not slot_schedule.is_due()
    held.append(slot_schedule.hand())
    assert slot_schedule.next_slot == 17
    assert slot_schedule.is_due()


def test_before_an_event_a_feed_holds_no_more_than_the_ranks_part() -> None:
    _, slot_schedule = alone(30, 30, [100.0, 10.0])
    held = [slot_schedule.hand() for _ in range(8)]
    assert held == [0, 1, 2, None, None, None, None, None]


def test_claims_grow_with_their_cost_but_stay_far_below_the_window() -> None:
    windows, slot_schedule = alone(10_000, 10_000, [1.0, 1.0])
    asked = []
    slot_schedule.claim = lambda many: asked.append(many) or 0  # type: ignore[func-returns-value]
    for slot_schedule.claim_ms in (0.0, 0.015, 10.0):
        assert slot_schedule.hand() is not None
        slot_schedule._slots.clear()
        slot_schedule._handed = 0
    assert asked == [1, 2, windows.counts[0] // 4]
