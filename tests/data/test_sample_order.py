import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from uneven.data.sample_order import permutation, prove_exactly_once, sample_keys
from uneven.policy.axis import Axis


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


AXIS = Axis(samples=10, slot_size=4, epochs=2)  # slots of 4, 4 and 2 samples, twice
WHOLE = [(0, 0, 4), (1, 4, 4), (2, 8, 2), (3, 0, 4), (4, 4, 4), (5, 8, 2)]


def test_untrained_slots_are_allowed_only_where_slots_are_claimed() -> None:
    logs = [[WHOLE[0], WHOLE[4]], [WHOLE[2]], []]
    assert prove_exactly_once(AXIS, logs) == 3
    with pytest.raises(RuntimeError, match="slot 1: positions 4 to 8 were left out"):
        prove_exactly_once(AXIS, logs, 5)
    assert prove_exactly_once(AXIS, [[], []]) == 0


def test_a_slot_may_be_trained_in_parts_by_several_ranks() -> None:
    assert prove_exactly_once(AXIS, [[(1, 4, 1)], [(1, 6, 2)], [(1, 5, 1)]]) == 1
    assert prove_exactly_once(AXIS, [[(0, 0, 3)], [(0, 3, 1)]], 1) == 1


@pytest.mark.parametrize(
    ("logs", "words"),
    [
        ([[WHOLE[0]], [WHOLE[0]]], r"slot 0: positions 0 to 4 were trained twice \(rank 1\)"),
        ([[WHOLE[5], WHOLE[5]], []], "slot 5: positions 8 to 10 were trained twice"),
        ([[(1, 4, 3)], [(1, 6, 2)]], "slot 1: positions 6 to 7 were trained twice"),
        ([[(1, 4, 1)], [(1, 6, 2)]], "slot 1: positions 5 to 6 were left out"),
        ([[(4, 4, 3)], []], "slot 4: positions 7 to 8 were left out"),
        ([[(2, 4, 4)], []], "slot 2"),
        ([[], [(6, 0, 4)]], "rank 1 trained slot 6, which is outside the run"),
        ([[(-1, 8, 2)]], "rank 0 trained slot -1, which is outside the run"),
    ],
)
def test_with_holes_allowed_a_slot_must_still_be_trained_once_and_whole(
    logs: list[list[tuple[int, int, int]]], words: str
) -> None:
    with pytest.raises(RuntimeError, match=words):
        prove_exactly_once(AXIS, logs)


@given(st.data())
def test_any_slots_in_any_order_on_any_ranks_are_proved(data: st.DataObject) -> None:
    claimed = data.draw(st.permutations(WHOLE).flatmap(lambda parts: st.integers(0, 6).map(lambda n: parts[:n])))
    logs: list[list[tuple[int, int, int]]] = [[], [], []]
    for part in claimed:
        logs[data.draw(st.integers(0, 2))].append(part)
    assert prove_exactly_once(AXIS, logs) == len(claimed)
    if claimed:
        logs[data.draw(st.integers(0, 2))].append(claimed[0])
        with pytest.raises(RuntimeError, match="trained twice"):
            prove_exactly_once(AXIS, logs)
