import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from uneven.data.ledger import permutation, sample_keys


@given(st.integers(0, 2**31), st.integers(0, 1000), st.integers(1, 500))
def test_an_epoch_is_a_permutation_fixed_by_seed_and_epoch(seed: int, epoch: int, samples: int) -> None:
    order = permutation(seed, epoch, samples)
    assert sorted(order.tolist()) == list(range(samples))
    assert np.array_equal(order, permutation(seed, epoch, samples))


def test_seeds_and_epochs_differ() -> None:
    orders = {tuple(permutation(seed, epoch, 50).tolist()) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_keys_are_distinct_over_positions_epochs_and_seeds() -> None:
    keys = np.concatenate([sample_keys(seed, epoch, 1000) for seed in range(4) for epoch in range(4)])
    assert len(np.unique(keys)) == len(keys)


def test_keys_of_a_position_do_not_depend_on_how_many_there_are() -> None:
    assert np.array_equal(sample_keys(3, 2, 10), sample_keys(3, 2, 1000)[:10])
