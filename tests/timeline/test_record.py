from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uneven.timeline.record import PACK_AFTER, PACK_EVENTS, STATES, TRAINING, Recorder


class Clock:
    def __init__(self) -> None:
        self.now = 1_000

    def __call__(self) -> int:
        return self.now


moves = st.lists(st.tuples(st.sampled_from(STATES), st.integers(0, 10**9)), max_size=40)


@given(moves)
def test_states_partition_the_wall_time(steps: list[tuple[str, int]]) -> None:
    clock = Clock()
    recorder = Recorder(clock=clock)
    expected = dict.fromkeys(STATES, 0)
    state = "setup"
    for next_state, ns in steps:
        clock.now += ns
        expected[state] += ns
        recorder.enter(next_state)
        state = next_state
    clock.now += 7
    expected[state] += 7
    before_close = recorder.account().seconds
    recorder.close()
    account = recorder.account()
    assert account.seconds == pytest.approx({name: ns / 1e9 for name, ns in expected.items()})
    assert account.seconds == pytest.approx(before_close)
    assert account.wall_s == pytest.approx((clock.now - 1_000) / 1e9)
    if account.training_s:
        assert sum(account.shares.values()) == pytest.approx(1)
    spans = recorder.spans()
    assert all(a[2] == b[1] and a[0] != b[0] for a, b in pairwise(spans))
    assert spans[0][1] == 1_000
    assert spans[-1][2] == clock.now


def test_compile_and_evaluation_stop_the_training_clock() -> None:
    clock = Clock()
    recorder = Recorder(clock=clock)
    for state in STATES:
        recorder.enter(state)
        clock.now += 10**9
    recorder.close()
    assert recorder.account().training_s == len(TRAINING)
    assert recorder.account().wall_s == len(STATES)


def test_an_unknown_state_raises() -> None:
    recorder = Recorder()
    recorder.enter("idle")
    recorder.enter("compute")
    with pytest.raises(KeyError):
        recorder.account()


def test_a_long_recording_is_packed_in_batches_and_complete() -> None:
    clock = Clock()
    recorder = Recorder(clock=clock)
    for index in range(2 * PACK_AFTER):
        clock.now += 3
        recorder.enter("compute" if index % 2 else "data")
    assert recorder.state == "compute"
    recorder.close()
    assert len(recorder.spans()) == 2 * PACK_AFTER + 2, "the first and the last span, which is empty, are setup"
    seconds = recorder.account().seconds
    assert seconds["data"] == pytest.approx(3e-9 * PACK_AFTER)
    assert seconds["compute"] == pytest.approx(3e-9 * (PACK_AFTER - 1))


@pytest.mark.parametrize("known", [0, 5, PACK_EVENTS - 1, PACK_EVENTS, PACK_EVENTS + 3])
def test_many_events_are_packed_and_complete(known: int) -> None:
    recorder = Recorder(2)
    for number in range(known):
        recorder.event("round", number=number)
    assert recorder.event_count == known
    for number in range(known, known + 2 * PACK_EVENTS):
        recorder.event("round", number=number, samples=[number, 1])
    assert [event.fields["number"] for event in recorder.events] == [*range(known + 2 * PACK_EVENTS)]
    since = recorder.events_since(known)
    assert [event.fields["number"] for event in since] == [*range(known, known + 2 * PACK_EVENTS)]
    assert since[-1] == recorder.events[-1]
    assert (since[0].rank, since[0].kind, since[0].fields["samples"]) == (2, "round", [known, 1])


@pytest.mark.parametrize(("estimated", "moment"), [(500, 2_000), (2_300, 2_300), (9_000, 2_500)])
def test_an_estimated_moment_lies_between_the_last_change_and_now(estimated: int, moment: int) -> None:
    clock = Clock()
    recorder = Recorder(clock=clock)
    clock.now = 2_000
    recorder.enter("wait")
    clock.now = 2_500
    assert recorder.enter("communication", estimated) == moment
    recorder.enter("compute")
    assert min(recorder.account().seconds.values()) >= 0
