"""A device that becomes far slower in the middle of a run: how soon its share follows, and what the others wait."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest

from uneven.policy.exact import PROBE_EVERY, Balanced
from uneven.policy.finish import Cost, equal_finish, finish_ms

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
    "equal": [FAST, FAST],
    "uneven": [FAST, FAST.scaled(2.5)],
    "far": [FAST, FAST.scaled(10.0)],
    "large fixed part": [Cost(5.0, 0.2), Cost(5.0, 0.2)],
    "eight": [FAST] * 8,
}
# What a feed reads ahead; captured steps, whose sizes lie on a grid and near those that were captured.
WAYS = [{}, {"lookahead": 2}, {"lookahead": 8}, {"lookahead": 16}, {"grid": 8, "lookahead": 1, "reach": 16}]


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
