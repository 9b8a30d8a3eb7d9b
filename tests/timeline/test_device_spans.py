"""A CUDA device's spans cover the same time as the host's, with the states of the device."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uneven.timeline.record import STATES, TRAINING, account_of, device_spans


def test_the_device_computes_while_the_host_does_something_else() -> None:
    host = [("setup", 0, 10), ("data", 10, 20), ("compute", 20, 30), ("communication", 30, 40), ("wait", 40, 60)]
    # Kernels enqueued at 20 run from 22 to 45, into the communication; then the device is idle while the host waits.
    assert device_spans(host, [(22, 45)]) == [
        ("setup", 0, 10),
        ("data", 10, 20),
        ("other", 20, 22),
        ("compute", 22, 45),
        ("wait", 45, 60),
    ]


def test_outside_training_the_host_state_is_kept() -> None:
    host = [("compute", 0, 10), ("evaluation", 10, 20), ("compute", 20, 30)]
    assert device_spans(host, [(0, 12), (25, 28)]) == [
        ("compute", 0, 10),
        ("evaluation", 10, 20),
        ("other", 20, 25),
        ("compute", 25, 28),
        ("other", 28, 30),
    ]


def test_without_busy_intervals_everything_is_idle() -> None:
    assert device_spans([("compute", 0, 5), ("data", 5, 9)], []) == [("other", 0, 5), ("data", 5, 9)]


lengths = st.lists(st.tuples(st.sampled_from(STATES), st.integers(1, 30)), min_size=1, max_size=12)
gaps = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30)), max_size=8)


@given(lengths, gaps)
def test_both_cover_the_same_time_and_busy_training_time_is_compute(
    pieces: list[tuple[str, int]], work: list[tuple[int, int]]
) -> None:
    host, at = [], 0
    for state, length in pieces:
        host.append((state, at, at + length))
        at += length
    busy, end = [], 0
    for gap, length in work:
        busy.append((end + gap, end + gap + length))
        end += gap + length
    spans = device_spans(host, busy)
    assert (spans[0][1], spans[-1][2]) == (0, at)
    assert all(before[2] == after[1] and before[0] != after[0] for before, after in pairwise(spans))
    in_training = {t for state, a, b in host if state in TRAINING for t in range(a, b)}
    at_work = {t for a, b in busy for t in range(a, b)} & in_training
    assert {t for state, a, b in spans if state == "compute" for t in range(a, b)} == at_work
    for state, a, b in host:
        rest = [t for t in range(a, b) if t not in at_work]
        name = "other" if state == "compute" else state
        assert all(any(name == s and x <= t < y for s, x, y in spans) for t in rest)
    assert sum(account_of(0, spans).seconds.values()) * 1e9 == pytest.approx(at)
