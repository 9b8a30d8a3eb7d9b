"""Shares calibrated in the first slots, without a warm-up, on simulated clusters."""

import json
import random

import pytest

from tests.policy.noisy_ranks import NoisyRanks
from uneven.policy.calibrating import CUTS, REPEATS, Calibrating
from uneven.policy.finish import Cost, equal_finish, finish_ms, fitted


def test_a_line_through_two_sizes_is_found() -> None:
    cost = fitted([(16, 4.0 + 16), (16, 4.0 + 16), (16, 99.0), (48, 4.0 + 48), (48, 4.0 + 48), (48, 0.1)])
    assert cost == Cost(4.0, 1.0)
    assert fitted([(8, 4.0)]) == Cost(0.0, 0.5)
    assert fitted([]) == Cost(0.0, 1.0)  # a rank that never had a sample


@pytest.mark.parametrize("seed", range(200))
def test_a_fixed_cost_does_not_drive_the_shares_to_one_end(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.randint(2, 6)
    costs = [Cost(rng.uniform(0.0, 30.0), rng.uniform(0.2, 2.0)) for _ in range(ranks)]
    cluster = NoisyRanks(costs, 0.03, rng)
    policy = Calibrating(ranks, 64 * ranks, lookahead=rng.choice([0, 0, 4]))
    for slot in range(60):
        shares = policy.shares(slot, policy.slot_size)
        assert sum(shares) == policy.slot_size
        spike = 20.0 if slot == 0 else 1.0  # the first step allocates
        policy.note(slot, policy.slot_size, [ms * spike for ms in cluster.busy_ms(shares)])
    best = finish_ms(costs, equal_finish(costs, policy.slot_size))
    assert best / finish_ms(costs, policy.shares(60, policy.slot_size)) > 0.9


def test_the_first_slots_have_three_sizes_and_short_slots_fit_in() -> None:
    policy = Calibrating(2, 64)
    sizes = {policy.shares(slot, 64) for slot in range(1 + REPEATS * len(CUTS))}
    assert sizes == {(32, 32), (16, 48), (48, 16)}
    assert sum(policy.shares(5, 7)) == 7


def test_caps_hold_while_learning_and_afterwards() -> None:
    policy = Calibrating(2, 64, caps=(60, 24))
    for slot in range(40):
        shares = policy.shares(slot, 64)
        assert sum(shares) == 64
        assert shares[0] <= 60
        assert shares[1] <= 24
        policy.note(slot, 64, [float(share) for share in shares])
    assert policy.shares(40, 64) == (40, 24)


def test_a_resumed_run_keeps_the_costs_and_begins_half_a_measurement_anew() -> None:
    cluster = NoisyRanks([Cost(10.0, 0.5), Cost(2.0, 1.0)], 0.1, random.Random(0))
    policy = Calibrating(2, 64, first=4)
    for slot in range(3, 40):
        resumed = Calibrating(2, 64, first=slot + 1)
        resumed.load_state_dict(json.loads(json.dumps(policy.state_dict())))
        if policy.costs is None:
            assert resumed == Calibrating(2, 64, first=slot + 1)
        else:
            assert resumed.shares(slot, 64) == policy.shares(slot, 64)
        busy_ms = cluster.busy_ms(policy.shares(slot, 64))
        move = policy.note(slot, 64, busy_ms)
        if resumed.costs is not None:
            assert resumed.note(slot, 64, busy_ms) == move
            assert resumed.fingerprint() == policy.fingerprint() != 0
    assert policy.costs is not None
