"""The device's lane out of the host's: the same time, other names."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uneven.timeline.device import account_of, seen_by_device
from uneven.timeline.record import STATES, TRAINING


def test_the_device_computes_while_the_host_does_something_else() -> None:
    host = [("setup", 0, 10), ("data", 10, 20), ("compute", 20, 30), ("communication", 30, 40), ("wait", 40, 60)]
    # Enqueued at 20 and at work from 22 on, into the sending; then idle while the host waits.
    assert seen_by_device(host, [(22, 45)]) == [
        ("setup", 0, 10),
        ("data", 10, 20),
        ("other", 20, 22),
        ("compute", 22, 45),
        ("wait", 45, 60),
    ]


def test_apart_from_training_the_host_says_what_it_was() -> None:
    host = [("compute", 0, 10), ("evaluation", 10, 20), ("compute", 20, 30)]
    assert seen_by_device(host, [(0, 12), (25, 28)]) == [
        ("compute", 0, 10),
        ("evaluation", 10, 20),
        ("other", 20, 25),
        ("compute", 25, 28),
        ("other", 28, 30),
    ]


def test_without_work_everything_is_idle() -> None:
    assert seen_by_device([("compute", 0, 5), ("data", 5, 9)], []) == [("other", 0, 5), ("data", 5, 9)]


lengths = st.lists(st.tuples(st.sampled_from(STATES), st.integers(1, 30)), min_size=1, max_size=12)
gaps = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30)), max_size=8)


@given(lengths, gaps)
def test_both_cover_the_same_time_and_work_is_work(pieces: list[tuple[str, int]], work: list[tuple[int, int]]) -> None:
    host, at = [], 0
    for state, length in pieces:
        host.append((state, at, at + length))
        at += length
    busy, end = [], 0
    for gap, length in work:
        busy.append((end + gap, end + gap + length))
        end += gap + length
    found = seen_by_device(host, busy)
    assert (found[0][1], found[-1][2]) == (0, at)
    assert all(one[2] == other[1] and one[0] != other[0] for one, other in pairwise(found))
    in_training = {t for state, a, b in host if state in TRAINING for t in range(a, b)}
    at_work = {t for a, b in busy for t in range(a, b)} & in_training
    assert {t for state, a, b in found if state == "compute" for t in range(a, b)} == at_work
    for state, a, b in host:
        rest = [t for t in range(a, b) if t not in at_work]
        name = "other" if state == "compute" else state
        assert all(any(name == s and x <= t < y for s, x, y in found) for t in rest)
    assert sum(account_of(0, found).seconds.values()) * 1e9 == pytest.approx(at)
