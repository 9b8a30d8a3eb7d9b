"""What is trained and what is not: a resumed run trains the gaps first, and every slot once."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uneven.policy.ledger import Ledger


def logs(ranks: list[list[int]]) -> list[list[tuple[int, int, int]]]:
    return [[(slot, 64 * slot, 64) for slot in slots] for slots in ranks]


def test_gaps_come_first_in_order() -> None:
    ledger = Ledger.from_logs(logs([[0, 1, 2, 5, 8], [3, 9]]))
    assert ledger.to_json() == {"trained": 7, "next": 10, "gaps": [[4, 5], [6, 8]]}
    assert [ledger.slot_at(position) for position in range(7, 13)] == [4, 6, 7, 10, 11, 12]
    assert ledger.first_untrained == 4
    assert ledger.trained_between == [(5, 6), (8, 10)]
    assert Ledger.from_json(json.loads(json.dumps(ledger.to_json()))) == ledger
    with pytest.raises(ValueError, match="position 6 lies before 7"):
        ledger.slot_at(6)
    assert ledger.advanced_to(8).to_json() == {"trained": 8, "next": 10, "gaps": [[6, 8]]}
    assert ledger.advanced_to(9).to_json() == {"trained": 9, "next": 10, "gaps": [[7, 8]]}
    assert ledger.advanced_to(10) == Ledger.prefix(10)
    assert ledger.advanced_to(12) == Ledger.prefix(12)


def test_slots_before_the_last_event_are_done_whatever_was_left_out_of_them() -> None:
    assert Ledger.from_logs(logs([[0, 1, 20], [2, 21]]), done=20) == Ledger.prefix(22)
    assert Ledger.from_logs([], done=20) == Ledger.prefix(20) == Ledger(20, 20)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.lists(st.sets(st.integers(0, 39)), max_size=3), st.integers(0, 40))
def test_every_slot_is_trained_once_however_often_a_run_stops(total: int, stops: list[set[int]], last: int) -> None:
    """Each run trains any positions at all, as ranks of several speeds do, and stops."""
    ledger, done = Ledger(), []
    for places in stops:
        chosen = [place for place in sorted(places) if ledger.trained <= place < total]
        slots = [ledger.slot_at(place) for place in chosen]
        done += slots
        ledger = ledger.after(reversed(slots))
        assert ledger == Ledger.from_logs(logs([done]))
        assert ledger.trained == len(done)
        assert ledger.next == max(done, default=-1) + 1
    rest = [ledger.slot_at(position) for position in range(ledger.trained, total)]
    assert sorted(done + rest) == list(range(total))
    event = max(ledger.trained, min(last, total))
    assert ledger.advanced_to(event) == ledger.after(rest[: event - ledger.trained])


def test_a_slot_that_was_trained_twice_is_found() -> None:
    for ranks in ([[0, 1], [1]], [[0, 3, 3]]):
        with pytest.raises(ValueError, match=r"slot [13] was trained twice"):
            Ledger.from_logs(logs(ranks))
    with pytest.raises(ValueError, match="slot 2 was trained twice"):
        Ledger.prefix(5).after([2, 7])


@pytest.mark.parametrize("gaps", [((3, 2),), ((0, 2), (2, 4)), ((8, 10),), ((4, 5), (2, 3)), ((-1, 3),)])
def test_what_is_no_ledger_is_refused(gaps: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="is none"):
        Ledger(6, 10, gaps)
    with pytest.raises(ValueError, match="before 10"):
        Ledger(9, 10, ())


def test_a_million_slots_are_cheap() -> None:
    """Every second slot of the last tenth is missing: positions are found by bisection, a prefix is two numbers."""
    assert Ledger.prefix(10**6).slot_at(10**6 + 5) == 10**6 + 5
    ledger = Ledger.prefix(990_000).after(range(990_001, 10**6, 2))
    assert ledger.trained == 995_000
    assert [ledger.slot_at(position) for position in (995_000, 999_999, 10**6)] == [990_000, 999_998, 10**6]
