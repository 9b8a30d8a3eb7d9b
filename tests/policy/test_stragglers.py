"""A device that becomes far slower in the middle of a run: how soon its share follows, and what the others wait."""

import json
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from tests.policy.cluster import Cluster, Outcome
from tests.policy.simulation import Simulation
from uneven.policy.claims import TRIPS_AHEAD
from uneven.policy.exact import PROBE_EVERY, Balanced
from uneven.policy.finish import Cost, equal_finish, finish_ms
from uneven.policy.late import split_beside
from uneven.policy.round_report import RoundReport
from uneven.policy.slot_schedule import SlotSchedule
from uneven.policy.windows import LocalSGDConfig, Windows

AT = 60  # the step at which the device changes
FAST = Cost(1.0, 0.4)


class Course(NamedTuple):
    """How the shares went, and each step's time over the best possible one."""

    shares: list[tuple[int, ...]]
    slower: list[float]
    policy: Balanced


def train(
    policy: Balanced, usual: Sequence[Cost], changes: dict[int, tuple[int, float]], steps: int, seed: int = 0
) -> Course:
    """`changes`: from this step on, (rank, how many times slower than usual)."""
    rng, truth = random.Random(seed), list(usual)
    copy = Balanced(policy.costs, policy.slot_size, None, policy.least, policy.lookahead, policy.grid)
    copy.reach = policy.reach
    course = Course([], [], policy)
    asked = {slot: policy.shares(slot, policy.slot_size) for slot in range(policy.lookahead)}
    for slot in range(steps):
        if slot in changes:
            rank, factor = changes[slot]
            truth[rank] = usual[rank].scaled(factor)
        ahead = slot + policy.lookahead
        asked[ahead] = policy.shares(ahead, policy.slot_size)
        shares = policy.shares(slot, policy.slot_size)
        assert shares == asked[slot] == copy.shares(slot, policy.slot_size), "a feed that asked ahead got other shares"
        best = equal_finish(truth, policy.slot_size, None, policy.least, policy.grid)
        course.shares.append(shares)
        course.slower.append(finish_ms(truth, shares) / finish_ms(truth, best))
        busy_ms = [
            cost.time_ms(share) * rng.uniform(0.95, 1.05) * (3.0 if rng.random() < 0.01 else 1.0)
            for cost, share in zip(truth, shares, strict=True)
        ]
        assert policy.note(slot, policy.slot_size, busy_ms) == copy.note(slot, policy.slot_size, busy_ms)
        assert policy.fingerprint() == copy.fingerprint()
    return course


def deserved(usual: Sequence[Cost], rank: int, factor: float, policy: Balanced) -> int:
    truth = [cost.scaled(factor if place == rank else 1.0) for place, cost in enumerate(usual)]
    return equal_finish(truth, policy.slot_size, None, policy.least, policy.grid)[rank]


CLUSTERS = {
    "uneven": [FAST, FAST.scaled(2.5)],
    "far": [FAST, FAST.scaled(10.0)],
    "large fixed part": [Cost(5.0, 0.2), Cost(5.0, 0.2)],
    "eight": [FAST] * 8,
}
# What a feed reads ahead; captured steps, whose sizes lie on a grid and near those that were captured.
WAYS = [{}, {"lookahead": 8}, {"lookahead": 16}, {"grid": 8, "lookahead": 1, "reach": 16}]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", list(CLUSTERS))
@pytest.mark.parametrize("which", [0, -1])
def test_balanced_cuts_the_share_of_a_ten_times_slower_device_within_twenty_steps(
    way: dict[str, int], name: str, which: int
) -> None:
    usual = CLUSTERS[name]
    rank = which % len(usual)
    policy = Balanced(tuple(usual), 64 * len(usual), **way)  # type: ignore[arg-type]
    want = deserved(usual, rank, 10.0, policy)
    course = train(policy, usual, {AT: (rank, 10.0)}, AT + 36)
    for shares in course.shares[AT + 20 :]:
        assert shares[rank] <= max(1.2 * want, want + policy.grid)
    # Noise makes the estimate of a share of a few samples inexact, and a step is as long as its slowest rank.
    assert sorted(course.slower[AT + 20 :])[8] < (1.25 if policy.grid == 1 else 2.0)


@pytest.mark.parametrize("lookahead", [0, 4])
@pytest.mark.parametrize("slow_steps", [1, 2])
def test_a_hiccup_does_not_move_the_shares(slow_steps: int, lookahead: int) -> None:
    policy = Balanced((FAST, FAST), 128, lookahead=lookahead)
    before = policy.shares(0, 128)
    for slot in range(60):
        shares = policy.shares(slot, 128)
        assert shares == before
        factor = 10.0 if 30 <= slot < 30 + slow_steps else 1.0
        assert policy.note(slot, 128, [FAST.time_ms(shares[0]), factor * FAST.time_ms(shares[1])]) is None


@pytest.mark.parametrize("way", [{}, {"lookahead": 2}, {"lookahead": 8}], ids=str)
def test_a_device_below_use_is_left_out_tried_again_and_comes_back(way: dict[str, int]) -> None:
    """Its fixed part alone takes longer than the others need for everything."""
    usual = [Cost(5.0, 0.2), Cost(5.0, 0.2)]
    policy = Balanced(tuple(usual), 128, **way)  # type: ignore[arg-type]
    healthy = 4 * PROBE_EVERY
    course = train(policy, usual, {AT: (1, 10.0), healthy: (1, 1.0)}, healthy + 3 * PROBE_EVERY)
    out = course.shares[AT + 20 : healthy]
    probes = [AT + 20 + place for place, shares in enumerate(out) if shares[1]]
    assert probes, "it is tried again"
    assert len(probes) <= len(out) / PROBE_EVERY + 1
    assert all(course.shares[slot][1] == 1 for slot in probes)
    probed = next(slot for slot in range(healthy, len(course.shares)) if course.shares[slot][1])
    assert probed < healthy + PROBE_EVERY
    assert course.shares[probed + 20][1] >= 0.8 * 64


def test_probes_of_a_device_that_is_far_too_slow_cost_little() -> None:
    usual = [FAST, FAST]
    course = train(Balanced(tuple(usual), 128), usual, {AT: (1, 300.0)}, 1000)
    out = slice(AT + 20, 1000)
    assert 2 <= sum(shares[1] > 0 for shares in course.shares[out]) <= 10
    assert sum(course.slower[out]) / len(course.slower[out]) < 1.11


def test_shares_that_left_their_reach_for_a_straggler_stay_near_the_new_ones() -> None:
    usual = [FAST, FAST, FAST]
    policy = Balanced(tuple(usual), 384, grid=8, reach=16)
    course = train(policy, usual, {AT: (2, 10.0), AT + 40: (1, 1.6)}, AT + 160)
    cut = course.shares[AT + 30]
    assert cut[2] <= 16
    tail = policy.shares(AT + 160, 40)
    assert tail[2] <= 4, "an epoch's short last slot follows"
    # The second change is an ordinary one: the shares follow it as far as sizes are captured around the new ones.
    assert all(abs(share - home) <= 16 + 8 for share, home in zip(course.shares[-1], cut, strict=True))


# Local policies, on the simulated clock


def simulate(
    slot_ms: list[float], rank: int, factor: float, is_async: bool, slots: int = 900, **cluster: Any
) -> Outcome:
    """Rank `rank` becomes so many times slower at slot 400; what must hold in any run is checked there."""
    truth = Cluster(slot_ms, slots, change=(rank, 400, factor), **cluster)
    return Simulation(truth, LocalSGDConfig(is_async=is_async), list(slot_ms)).run()


def began_ms(outcome: Outcome, rank: int) -> float:
    own = set(outcome.slots[rank])
    return min(start for slot, start, _ in outcome.work if slot in own and slot >= 400)


def followed(outcome: Outcome, rank: int, factor: float) -> tuple[int, float]:
    """Until its count suits its new speed: the rank's own steps, and the others' idle time."""
    cluster, began = outcome.cluster, began_ms(outcome, rank)
    speeds = [1.0 / ms / (factor if place == rank else 1.0) for place, ms in enumerate(cluster.slot_ms)]
    deserved = speeds[rank] / sum(speeds)
    until = next(
        one.arrival_ms
        for one in outcome.rounds
        if one.arrival_ms > began and one.counts[rank] / sum(one.counts) <= 1.2 * deserved
    )
    own = set(outcome.slots[rank])
    steps = sum(slot in own and began <= start < until for slot, start, _ in outcome.work)
    busy_ms = sum(
        min(end, until) - max(start, began)
        for slot, start, end in outcome.work
        if slot not in own and end > began and start < until
    )
    return steps, (cluster.ranks - 1) * (until - began) - busy_ms


LOCAL = [([10.0, 10.0], 0), ([10.0, 25.0], 0), ([10.0, 25.0], 1), ([10.0] * 8, 7)]


@pytest.mark.parametrize("cluster", [{"lookahead": 8}, {"transfer_ms": 40.0}, {"epoch": 150}], ids=str)
@pytest.mark.parametrize(("slot_ms", "rank"), LOCAL, ids=str)
def test_cadence_cuts_the_count_of_a_ten_times_slower_device_within_twenty_steps(
    slot_ms: list[float], rank: int, cluster: dict[str, Any]
) -> None:
    outcome = simulate(slot_ms, rank, 10.0, is_async=False, **cluster)
    steps, idle_ms = followed(outcome, rank, 10.0)
    assert steps <= 20
    # Without handing back the others waited for ten windows of theirs.
    assert idle_ms / (len(slot_ms) - 1) <= 3 * 10.0 * slot_ms[rank]


@pytest.mark.parametrize("cluster", [{}, {"lookahead": 4}, {"trip_ms": 20.0}], ids=str)
@pytest.mark.parametrize(("slot_ms", "rank"), LOCAL, ids=str)
def test_in_async_nobody_waits_for_a_ten_times_slower_device(
    slot_ms: list[float], rank: int, cluster: dict[str, Any]
) -> None:
    """At an event they wait for what it holds: a slot or two, and at the first one what it had claimed before."""
    outcome = simulate(slot_ms, rank, 10.0, is_async=True, epoch=150, **cluster)
    began, own = began_ms(outcome, rank), set(outcome.slots[rank])
    ahead = cluster.get("lookahead", 0) + 2 * TRIPS_AHEAD * cluster.get("trip_ms", 0.0) / slot_ms[rank]
    for event in (450, 600, 750, 900):
        ends = {True: 0.0, False: 0.0}  # the last slot's, of the rank and of the others
        for slot, start, end in outcome.work:
            if event - 150 <= slot < event and start > began:
                ends[slot in own] = max(ends[slot in own], end)
        held = (ends[True] - ends[False]) / (10.0 * slot_ms[rank])
        assert held <= 2.0 + (ahead if event <= 600 else 0), f"it holds up the event at {event}"


@pytest.mark.parametrize("is_async", [False, True])
def test_a_local_policy_leaves_out_a_device_below_use_and_takes_it_back(is_async: bool) -> None:
    slot_ms = [10.0, 10.0, 10.0]
    outcome = simulate(slot_ms, 2, 100.0, is_async, 4000, recovers=2000, spikes=0.01)
    counts = [one.counts[2] for one in outcome.rounds]
    out = counts.index(0)
    back = next(place for place, count in enumerate(counts) if place > out and count)
    entered = [one.rows[2].samples for one in outcome.rounds]
    assert all(count == 0 for count in counts[out:back])
    assert sum(samples > 0 for samples in entered[out + 2 : back + 1]) >= 1, "it was tried again"
    assert max(entered[out + 3 : back]) <= 64, "by a slot"
    assert min(counts[back:]) >= 9, "and stays"
    assert sum(slot >= 3700 for slot in outcome.slots[2]) > 70


@pytest.mark.parametrize("is_async", [False, True])
def test_probes_of_a_device_that_stays_slow_cost_the_others_little(is_async: bool) -> None:
    usual, slow = Cluster([10.0, 10.0], 1200), Cluster([10.0, 10.0, 10.0], 1200, change=(2, 20, 100.0))
    config = LocalSGDConfig(is_async=is_async)
    alone = Simulation(usual, config, [10.0, 10.0]).run()
    together = Simulation(slow, config, [10.0, 10.0, 10.0]).run()
    assert together.makespan_ms < 1.1 * alone.makespan_ms + 5 * 1000.0, "some slots until it was left out, and probes"


def test_a_device_that_was_slow_from_the_start_is_not_left_out() -> None:
    windows = Windows(LocalSGDConfig(), 3, 64, lambda slot: 10**9, [10.0, 10.0, 1000.0])
    for _ in range(5):
        rows = [
            RoundReport(next_slot=windows.due, samples=64.0 * count, busy_ms=count * ms)
            for count, ms in zip(windows.cut(), (10.0, 10.0, 1100.0), strict=True)
        ]
        windows.note(rows)
    assert windows.counts[2] == 10


def test_slots_change_hands_once_and_by_speed() -> None:
    """A late rank hands back what its feed has not got, keeps the rest, and gets fewer for it in the next window."""
    assert split_beside([0, 0], [2.0, 1.0], 9) == (6, 3)
    assert split_beside([0, 2], [2.0, 1.0], 7) == (6, 1)
    assert split_beside([0, 8], [2.0, 1.0], 4) == (4, 0)
    assert split_beside([0, 8, 0], [2.0, 1.0, 0.0], 4) == (4, 0, 0)
    windows = Windows(LocalSGDConfig(), 2, 64, lambda slot: 10**9, [10.0, 10.0])
    late, other = SlotSchedule(windows, 0, 10**9, None), SlotSchedule(windows, 1, 10**9, None)
    assert [late.hand() for _ in range(4)] == [0, 1, 2, 3]
    assert [other.hand() for _ in range(10)] == list(range(10, 20))
    late.trained(100.0)
    assert late.is_late
    assert late.is_due()
    fields = late.hand_back()
    assert (fields["returned"], fields["kept"]) == (6, 3)
    assert late.next_slot == 1
    row = RoundReport(next_slot=1, samples=64, busy_ms=100.0, **{**fields, "recent_ms": 100.0})
    late.enter()
    windows.note([row, RoundReport(next_slot=20, samples=640, busy_ms=100.0)])
    late.merged()
    assert windows.back == [4, 5, 6, 7, 8, 9]
    assert windows.unfinished == [[1, 2, 3], []]
    assert windows.counts == (10, 100)
    assert sum(windows.cut()) + 3 == 110 + 3
    assert windows.cut()[0] == 7
    assert list(windows.slots_of(0)) == [4, 5, 6, 7, 8, 9, 20]
    assert late.next_slot == 1
    copy = Windows(LocalSGDConfig(), 2, 64, lambda slot: 10**9, [1.0, 1.0])
    copy.load_state_dict(json.loads(json.dumps(windows.state_dict())))
    assert copy.fingerprint() == windows.fingerprint()


def test_one_stall_hands_slots_over_but_moves_no_count() -> None:
    cluster = Cluster([10.0, 10.0], 400, stop=(1, 203, 2000.0))
    outcome = Simulation(cluster, LocalSGDConfig(), [10.0, 10.0]).run()
    assert any(row.returned for one in outcome.rounds for row in one.rows.values())
    assert {one.counts for one in outcome.rounds} == {(10, 10)}
    assert outcome.makespan_ms < 4000.0 + 200.0
