"""The exact policies on simulated clusters: efficiency, settling, no oscillation; thousands of them."""

import json
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policy.noisy_ranks import NoisyRanks
from uneven.policy.exact import PROBE_EVERY, Balanced, Fixed
from uneven.policy.finish import Cost, equal_finish, finish_ms


@given(st.integers(1, 1000), st.integers(1, 64))
def test_even_shares_differ_by_at_most_one_and_sum_up(samples: int, ranks: int) -> None:
    each, more = divmod(samples, ranks)
    assert Fixed.even(ranks).shares(0, samples) == (each + 1,) * more + (each,) * (ranks - more)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(1, 200))
def test_fixed_shares_keep_the_ratio(ratio: list[int], samples: int) -> None:
    if sum(ratio) == 0:
        return
    shares = Fixed(tuple(float(part) for part in ratio)).shares(0, samples)
    assert sum(shares) == samples
    for share, part in zip(shares, ratio, strict=True):
        assert abs(share - samples * part / sum(ratio)) <= len(ratio)
        assert part > 0 or share == 0


def test_five_to_two() -> None:
    assert Fixed((5.0, 2.0)).shares(0, 70) == (50, 20)


def simulate(
    policy: Balanced, cluster: NoisyRanks, slots: int, change: Callable[[int], None] = lambda slot: None
) -> tuple[list[float], list[int]]:
    """Efficiency of each slot against the best whole split, and the slots at which shares moved."""
    efficiencies, moves = [], []
    costs: list[Cost] = []
    for slot in range(slots):
        change(slot)
        shares = policy.shares(slot, policy.slot_size)
        assert sum(shares) == policy.slot_size
        if costs != cluster.costs:  # searched for once, not in every slot
            costs = list(cluster.costs)
            best = finish_ms(costs, equal_finish(costs, policy.slot_size, policy.caps, policy.least))
        efficiencies.append(best / finish_ms(cluster.costs, shares))
        if policy.note(slot, policy.slot_size, cluster.busy_ms(shares)) is not None:
            moves.append(slot)
    return efficiencies, moves


def random_cluster(rng: random.Random, ranks: int) -> list[Cost]:
    return [Cost(rng.uniform(0, 3), rng.uniform(0.2, 1.0) * rng.choice([1, 1, 2.5, 10])) for _ in range(ranks)]


@pytest.mark.parametrize(
    ("ranks", "clusters"),
    [
        *((2, 40), (3, 40), (4, 40), (8, 15), (16, 8), (64, 1)),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in ((2, 300), (3, 300), (4, 300), (8, 60), (16, 60), (64, 4))
        ),
    ],
)
def test_hundreds_of_clusters_with_wrong_hints_settle_and_stay(ranks: int, clusters: int) -> None:
    rng = random.Random(ranks)
    late_moves, reached = [], []
    for _ in range(clusters):
        truth = random_cluster(rng, ranks)
        hints = tuple(cost.scaled(rng.choice([1.0, 0.5, 2.0, 0.8])) for cost in truth)
        caps = None if rng.random() < 0.7 else tuple(rng.randint(2, 40) for _ in truth)
        slot_size = ranks * rng.choice([8, 16, 32])
        policy = Balanced(hints, slot_size, caps)
        efficiencies, moves = simulate(policy, NoisyRanks(truth, 0.05, rng), 80)
        reached.append(sum(efficiencies[20:]) / 60)
        late_moves.append(sum(slot >= 30 for slot in moves))
    # A wrong hint may leave a rank idle until it is probed; else little is lost.
    assert min(reached) > 0.8
    assert sum(reached) / clusters > 0.96
    # Noise of 5 % and rare spikes of 200 % may move shares now and then, not all the time.
    assert sum(late_moves) / len(late_moves) < 5


@pytest.mark.parametrize("many", [15, pytest.param(100, marks=pytest.mark.soak)])
@pytest.mark.parametrize("new_speed", [0.2, 0.4, 0.8, 2.0, 3.0])
def test_shares_follow_a_changed_device_within_twenty_steps(new_speed: float, many: int) -> None:
    rng = random.Random(1)
    for _ in range(many):
        cluster = NoisyRanks([Cost(1.0, 0.4), Cost(1.0, 0.4).scaled(2.5)], 0.05, rng)
        policy = Balanced(tuple(cluster.costs), 64)

        def change(slot: int, cluster: NoisyRanks = cluster) -> None:
            if slot == 50:
                cluster.costs[1] = cluster.costs[1].scaled(1 / new_speed)

        efficiencies, _ = simulate(policy, cluster, 120, change)
        assert sorted(efficiencies[70:80])[2] > 0.85
        assert sum(efficiencies[70:]) / 50 > 0.95


def test_nothing_moves_without_a_reason() -> None:
    cluster = NoisyRanks([Cost(1.0, 1.0), Cost(2.0, 2.5)], 0.0, random.Random(0))
    cluster.rng.random = lambda: 1.0  # type: ignore[method-assign]  # no spikes
    _, moves = simulate(Balanced(tuple(cluster.costs), 64), cluster, 200)
    assert moves == []


def test_a_share_at_most_doubles_in_one_move() -> None:
    policy = Balanced((Cost(0, 1.0), Cost(0, 8.0)), 64)
    before = policy.shares(0, 64)
    for slot in range(5):
        policy.note(slot, 64, [cost * share for cost, share in zip((1.0, 0.5), before, strict=True)])
        after = policy.shares(slot + 1, 64)
        assert all(new <= 2 * max(old, 1) for old, new in zip(before, after, strict=True))
        before = after
    assert before[1] > before[0]


def test_an_idle_rank_is_probed_and_comes_back_when_it_is_fast_again() -> None:
    policy = Balanced((Cost(0.1, 0.1), Cost(500.0, 1.0)), 32)
    assert policy.shares(0, 32) == (32, 0)
    assert policy.shares(PROBE_EVERY - 1, 32) == (31, 1)
    for slot in range(6 * PROBE_EVERY):
        shares = policy.shares(slot, 32)
        policy.note(slot, 32, [0.1 + 0.1 * shares[0], 0.2 * shares[1]])
    assert policy.shares(6 * PROBE_EVERY, 32)[1] > 0


def test_a_rank_that_is_kept_has_a_few_samples_whatever_it_costs_and_gets_more_at_once() -> None:
    policy = Balanced((Cost(0.0, 1.0), Cost(90.0, 1.0), Cost(0.0, 1.0)), 32, (32, 32, 0), 2, keeps_all=True)
    assert [policy.shares(slot, 32) for slot in range(2 * PROBE_EVERY)] == [(30, 2, 0)] * 2 * PROBE_EVERY
    for slot in range(20):
        one, two, _ = policy.shares(slot, 32)
        policy.note(slot, 32, [one, 0.01 * (90.0 + two), 0.0])
    assert policy.shares(20, 32)[1] >= 16


def test_a_feed_that_asks_ahead_gets_what_will_be_in_force() -> None:
    policy = Balanced((Cost(0, 1.0), Cost(0, 1.0)), 32, lookahead=3)
    asked = {}
    for slot in range(40):
        asked[slot + 3] = policy.shares(slot + 3, 32)
        move = policy.note(slot, 32, [16.0, 40.0] if slot > 5 else [16.0, 16.0])
        assert move is None or move.slot == slot + 4
    assert all(policy_shares == asked[slot] for slot, policy_shares in asked.items() if slot < 4)
    assert asked[42][1] < 16


def test_copies_fed_the_same_numbers_have_the_same_fingerprint_and_others_do_not() -> None:
    rng = random.Random(0)
    costs = tuple(random_cluster(rng, 4))
    one, two, other = Balanced(costs, 64), Balanced(costs, 64), Balanced(costs, 64)
    for slot in range(50):
        busy = [rng.uniform(5, 50) for _ in range(4)]
        one.note(slot, 64, busy)
        two.note(slot, 64, busy)
        other.note(slot, 64, [b * 1.001 for b in busy])
        assert one.fingerprint() == two.fingerprint() < 2**24
    assert one.fingerprint() != other.fingerprint()


@given(st.integers(1, 63))
def test_a_short_last_slot_keeps_the_proportions(samples: int) -> None:
    policy = Balanced((Cost(0, 1.0), Cost(0, 2.5), Cost(0, 1e6)), 64)
    shares = policy.shares(7, samples)
    assert sum(shares) == samples
    assert shares[2] == 0
    assert abs(shares[0] - samples * 46 / 64) <= 2


@pytest.mark.parametrize("many", [15, pytest.param(100, marks=pytest.mark.soak)])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_on_a_grid_shares_settle_stay_and_are_multiples(ranks: int, many: int) -> None:
    rng = random.Random(ranks)
    for _ in range(many):
        truth = random_cluster(rng, ranks)
        hints = tuple(cost.scaled(rng.choice([1.0, 0.5, 2.0, 0.8])) for cost in truth)
        policy = Balanced(hints, ranks * 64 + rng.choice([0, 5]), grid=8)
        cluster, moves, spent_ms, best_ms = NoisyRanks(truth, 0.05, rng), 0, 0.0, 0.0
        best = finish_ms(truth, equal_finish(truth, policy.slot_size, grid=8))
        for slot in range(120):
            shares = policy.shares(slot, policy.slot_size)
            assert sum(shares) == policy.slot_size
            assert sum(share % 8 != 0 for share in shares) == (policy.slot_size % 8 > 0)
            move = policy.note(slot, policy.slot_size, cluster.busy_ms(shares))
            if slot >= 40:
                moves += move is not None
                spent_ms += finish_ms(truth, shares)
                best_ms += best
        assert moves < 12
        assert best_ms / spent_ms > 0.8


def test_on_a_grid_an_idle_rank_is_probed_by_one_step_of_it() -> None:
    policy = Balanced((Cost(0.1, 0.1), Cost(500.0, 1.0)), 64, grid=8)
    assert policy.shares(PROBE_EVERY - 1, 64) == (56, 8)


@given(
    st.lists(st.integers(2, 40), min_size=2, max_size=4),
    st.sampled_from([1, 4]),
    st.randoms(use_true_random=False),
)
def test_caps_hold_whatever_the_speeds_do(caps: list[int], grid: int, rng: random.Random) -> None:
    caps = [grid * cap for cap in caps]
    slot_size = rng.randint(grid, sum(caps) - grid)
    policy = Balanced(tuple(random_cluster(rng, len(caps))), slot_size, tuple(caps), grid=grid)
    for slot in range(60):
        for samples in (slot_size, rng.randint(1, slot_size)):
            shares = policy.shares(slot, samples)
            assert sum(shares) == samples
            assert all(share <= cap for share, cap in zip(shares, caps, strict=True))
        shares = policy.shares(slot, slot_size)
        policy.note(slot, slot_size, [share * rng.uniform(0.1, 10.0) for share in shares])


def test_a_policy_that_loads_the_state_goes_on_alike() -> None:
    rng = random.Random(3)
    costs = [Cost(2.0, 0.5), Cost(4.0, 1.0, 48.0), Cost(1.0, 0.2)]
    cluster = NoisyRanks(costs, 0.2, rng)
    policy = Balanced((Cost(1.0, 1.0), Cost(1.0, 1.0, 48.0), Cost(1.0, 1.0)), 96, lookahead=2, grid=4)
    for slot in range(80):
        resumed = Balanced((Cost(9.0, 9.0),) * 3, 96, lookahead=2, grid=4)
        resumed.load_state_dict(json.loads(json.dumps(policy.state_dict(), allow_nan=False)))
        assert resumed == policy
        busy_ms = cluster.busy_ms(policy.shares(slot, 96))
        assert resumed.note(slot, 96, busy_ms) == policy.note(slot, 96, busy_ms)
        assert resumed.fingerprint() == policy.fingerprint()
    with pytest.raises(ValueError, match="the state of 3 ranks does not fit 2"):
        Balanced((Cost(1.0, 1.0),) * 2, 96).load_state_dict(policy.state_dict())
    assert Fixed.even(2).state_dict() == {}


def test_a_state_that_memory_cannot_hold_any_more_gives_new_shares() -> None:
    policy = Balanced((Cost(0.0, 1.0), Cost(0.0, 3.0)), 96)
    tight = Balanced((Cost(0.0, 1.0), Cost(0.0, 3.0)), 96, caps=(64, 64))
    tight.load_state_dict(policy.state_dict())
    assert policy.shares(0, 96) == (72, 24)
    assert tight.shares(0, 96) == (64, 32)


def test_shares_stay_in_reach_until_they_may_move_anew() -> None:
    """A captured step has graphs for the sizes around the split, and one share of an epoch's short last slot."""
    policy = Balanced((Cost(0.0, 1.0), Cost(0.0, 1.0), Cost(0.0, 1.0)), 384, grid=8, reach=16)
    assert policy.shares(0, 384) == (128, 128, 128)
    tail = policy.shares(0, 40)

    def train(first: int) -> None:
        """The third rank is really four times as slow."""
        for slot in range(first, first + 40):
            shares = policy.shares(slot, 384)
            assert sum(shares) == 384
            assert all(abs(share - home) <= 16 + 8 for share, home in zip(shares, homes, strict=True))
            assert policy.shares(slot, 40) == tail
            policy.note(slot, 384, [shares[0], shares[1], 4.0 * shares[2]])

    for first in range(0, 400, 40):
        homes = policy.shares(first, 384)
        train(first)
        policy.recenter()
        tail = policy.shares(first + 40, 40)
    assert policy.shares(400, 384) == (176, 168, 40)


def test_steps_that_no_split_could_gain_from_are_decided_without_solving(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without the short way: the same moves. Held by a bound that no split can beat."""

    def moves(seed: int) -> list[object]:
        rng = random.Random(seed)
        cluster = NoisyRanks([Cost(rng.uniform(0, 3), rng.uniform(0.05, 1)) for _ in range(3)], 0.05, rng)
        policy = Balanced((Cost(1.0, 0.2),) * 3, 96, least=2, grid=rng.choice([1, 8]))
        return [policy.note(slot, 96, cluster.busy_ms(policy.shares(slot, 96))) for slot in range(60)]

    short = [moves(seed) for seed in range(20)]
    assert any(move is not None for found in short for move in found)
    monkeypatch.setattr("uneven.policy.exact.earliest_ms", lambda costs, samples: 0.0)
    assert [moves(seed) for seed in range(20)] == short
