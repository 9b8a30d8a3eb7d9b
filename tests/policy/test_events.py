"""Events lie at the same slots of the axis for every rank: evaluations, checkpoints, epoch ends, the end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uneven.config import Evaluation, Every, read_every, resolve
from uneven.policy.axis import Axis
from uneven.policy.events import Events, find_events

AXIS = Axis(70, 8, 4)  # 9 slots an epoch


def events(every: int | str | None = None, given: int | str = 1, *, axis: Axis = AXIS, **settings: object) -> Events:
    config = resolve({"batch_size": 8, "epochs": 4, "eval_every": every, **settings})
    return find_events(axis, config, Evaluation(None, lambda *_: ({}, 1), given), is_own_loop=False)


def evaluated(found: Events) -> list[int]:
    return [slot for slot in range(1, found.axis.total + 1) if found.evaluates(slot)]


@pytest.mark.parametrize(
    ("every", "given", "slots"),
    [
        (None, 1, [9, 18, 27, 36]),
        (None, "epoch", [9, 18, 27, 36]),
        (None, 3, [27, 36]),
        ("2 epochs", 3, [18, 36]),
        ("10 steps", 1, [10, 20, 30, 36]),
        (None, "10 steps", [10, 20, 30, 36]),
        ("100 steps", 1, [36]),
        ("9 steps", 1, [9, 18, 27, 36]),
    ],
)
def test_evaluations(every: int | str | None, given: int | str, slots: list[int]) -> None:
    assert evaluated(events(every, given)) == slots


def test_the_unfinished_last_epoch_is_evaluated() -> None:
    assert evaluated(events(axis=Axis(70, 8, 4, max_slots=20))) == [9, 18, 20]


def test_with_an_interval_the_end_of_the_run_is_a_checkpoint() -> None:
    for every, slots in (("13 steps", [13, 26, 36]), ("2 epochs", [18, 36]), ("10 min", [36]), (None, [])):
        found = events(save_every=every, out="runs/x")
        assert [slot for slot in range(1, 37) if found.saves(slot)] == slots
    found.request_save(36)
    assert found.saves(36)  # one that was asked for shortly before the end is taken there


def test_a_checkpoint_alone_has_no_entry_in_the_history() -> None:
    found = events("10 steps", save_every="6 steps", out="runs/x", axis=Axis(70, 8, 4, max_slots=34))
    assert [slot for slot in range(1, 35) if found.has_entry(slot)] == [9, 10, 18, 20, 27, 30, 34]


def test_without_any_the_end_of_the_run_is_the_only_event_and_an_own_loop_sees_every_epoch() -> None:
    assert Events(AXIS).next_event(0) == Events(AXIS).next_event(36) == 36
    assert not Events(AXIS).evaluates(36)
    assert [Events(AXIS, has_every_epoch=True).next_event(slot) for slot in (0, 8, 9, 35, 36)] == [9, 9, 18, 36, 36]


intervals = st.builds(Every, number=st.integers(1, 50), unit=st.sampled_from(["steps", "epochs"]))


@given(intervals, intervals, st.integers(1, 60))
def test_the_next_event_is_the_first_slot_at_which_something_is_done(each: Every, save: Every, limit: int) -> None:
    found = Events(Axis(70, 8, 4, max_slots=limit), each, save)
    for slot in range(found.axis.total):
        later = range(slot + 1, found.axis.total + 1)
        done = [one for one in later if found.evaluates(one) or found.saves(one) or one == found.axis.total]
        assert found.next_event(slot) == done[0]


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (2, Every(2, "epochs")),
        ("epoch", Every(1, "epochs")),
        ("1 step", Every(1, "steps")),
        (" 1_000 steps ", Every(1000, "steps")),
        ("500steps", Every(500, "steps")),
        ("2 epochs", Every(2, "epochs")),
        ("10 min", Every(600.0, "seconds")),
        ("5 minutes", Every(300.0, "seconds")),
        ("30 s", Every(30.0, "seconds")),
        ("90sec", Every(90.0, "seconds")),
        ("1 second", Every(1.0, "seconds")),
        ("2 hrs", Every(7200.0, "seconds")),
        (" 1.5 h ", Every(5400.0, "seconds")),
        (".5 hours", Every(1800.0, "seconds")),
        *[(bad, None) for bad in (0, -1, True, 2.5, "", "0 steps", "-5 steps", "5", "steps 5", None, "0 s", "-1 min")],
        *[
            (bad, None)
            for bad in (
                "5 ms",
                "5 ss",
                "5 m",
                "min",
                "1e3 s",
                "1.5 steps",
                "1 . 5 h",
                "10 minss",
                "inf h",
                "9" * 400 + " h",
            )
        ],
    ],
)
def test_intervals_as_they_are_written(value: object, wanted: Every | None) -> None:
    assert read_every(value) == wanted


def test_times_have_no_slots_until_one_is_requested() -> None:
    found = events("10 min", save_every="30 s", out="runs/x")
    assert evaluated(found) == [36]
    assert [slot for slot in range(37) if found.saves(slot)] == [36]
    assert found.next_event(0) == 36
    found.request_save(11)
    found.request_evaluation(20)
    assert [slot for slot in range(37) if found.saves(slot)] == [11, 36]
    assert evaluated(found) == [20, 36]
    assert [found.next_event(slot) for slot in (0, 10, 11, 19, 20, 36)] == [11, 11, 20, 20, 36, 36]
    without = Events(AXIS)
    without.request_evaluation(5)
    without.request_save(7)
    assert without.next_event(0) == 7, "nothing to evaluate"
    assert Events(AXIS).next_event(0) == 36, "requests are of one run"


@given(intervals, st.sets(st.integers(1, 36), max_size=4), st.sets(st.integers(1, 36), max_size=4))
def test_requests_and_intervals_go_together(each: Every, saves: set[int], evaluations: set[int]) -> None:
    found = Events(AXIS, each, None)
    for slot in saves:
        found.request_save(slot)
    for slot in evaluations:
        found.request_evaluation(slot)
    for slot in range(36):
        done = [one for one in range(slot + 1, 37) if found.evaluates(one) or found.saves(one) or one == 36]
        assert found.next_event(slot) == done[0]
