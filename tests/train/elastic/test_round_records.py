"""What the store keeps of every rank's rounds."""

from collections.abc import Iterator

import pytest

from uneven.comm.store import Store, open_store
from uneven.policy.lineage import Era, Part
from uneven.policy.recorded import Round
from uneven.train.rank_info import CHUNK, RoundRecords


@pytest.fixture
def store() -> Iterator[Store]:
    store, _ = open_store()
    yield store
    del store


def slots(*numbers: int) -> list[Part]:
    return [(number, 4 * (number % 5), 4) for number in numbers]


def test_only_rounds_that_count_are_read_of_a_member_that_is_gone(store: Store) -> None:
    records = RoundRecords(store, "b")
    records.write(0, 0, slots(0), [], Round(0, 1, 1, 1.0))
    for number in range(1, 301):
        records.write(0, number, slots(number), slots(number) if number == 2 else [], Round(number, number, 1, 2.0))
    records.write(1, 1, slots(400, 401), [], Round(9, 9, 9, 2.0))
    records.write(1, 2, slots(500), [], Round(9, 9, 9, 2.0))
    eras = [Era(0, 299, ("a", "b")), Era(1, 1, ("a", "b")), Era(2, 5, ("a",))]
    found = RoundRecords(store, "a").read(eras, "b")
    assert found["log"] == slots(*range(300), 400, 401), "neither the round 300 nor the second of generation 1"
    assert found["dropped"] == slots(2)
    assert len(found["rounds"]) == 301


@pytest.mark.parametrize("rounds", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1])
def test_a_member_is_read_wherever_in_a_chunk_it_was_lost(store: Store, rounds: int) -> None:
    records = RoundRecords(store, "b")
    for number in range(rounds + 1):
        records.write(3, number, slots(number), [], Round(number, number, number, 1.0))
    found = RoundRecords(store, "a").read([Era(3, rounds, ("a", "b"))], "b")
    assert found["log"] == slots(*range(rounds + 1))


def test_the_store_holds_few_bytes_of_a_round(store: Store) -> None:
    """294 of each when it had a key of its own, and a run of a week has a million rounds."""
    records = RoundRecords(store, "host/cuda:0/1234abcd")
    known = store.num_keys()
    for number in range(50 * CHUNK):
        records.write(0, number, slots(2 * number, 2 * number + 3), [], Round(2 * number, number, number, 1.37))
    assert store.num_keys() - known <= 50 + CHUNK
    chunks = [store.get(f"parts/chunk-{number}/host/cuda:0/1234abcd") for number in range(49)]
    assert sum(map(len, chunks)) < 35 * 49 * CHUNK
