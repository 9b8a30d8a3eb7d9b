"""A log of rounds played again: the rank's own slots in their order, entries and merges between the same two."""

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from uneven import InputError
from uneven.data.replay import Log, log_record, read_log
from uneven.policy.axis import Axis
from uneven.policy.recorded import RecordedSchedule, RecordedWindows, Round
from uneven.policy.round_report import RoundReport

START = Round(0, 0, 0, 1.0)


def events_at(*slots: int) -> Callable[[int], int]:
    return lambda slot: next((event for event in slots if event > slot), slots[-1])


def play(
    slots: list[int], rounds: list[Round], events: tuple[int, ...], lookahead: int = 0, has_arrived: bool = False
) -> list[Any]:
    """What a pace makes of them: slots as they are trained, ("enter", its next slot) and ("merge", lead, scale)."""
    windows = RecordedWindows(rounds, 2, events_at(*events), [float(len(slots)), 2.0])
    slot_schedule = RecordedSchedule(windows, deque(slots), events[-1])
    asked: deque[int] = deque()
    trace: list[Any] = []
    for _ in range(4 * (len(slots) + len(rounds))):  # more would be a pace that hangs
        while len(asked) <= lookahead and (slot := slot_schedule.hand()) is not None:
            assert slot < windows.event, "no slot is read past an event that is not passed"
            asked.append(slot)
        if asked:
            trace.append(asked.popleft())
            slot_schedule.trained()
        while not slot_schedule.is_over:
            if slot_schedule.in_flight:
                if not slot_schedule.may_merge(has_arrived):
                    break
                staleness = slot_schedule.staleness
                other = RoundReport(next_slot=windows.due)
                assert windows.note([RoundReport(next_slot=slot_schedule.next_slot), other]) == []
                slot_schedule.merged()
                trace.append(("merge", staleness, windows.scale))
            elif slot_schedule.is_due():
                trace.append(("enter", slot_schedule.next_slot))
                slot_schedule.enter()
            else:
                break
        if slot_schedule.is_over:
            assert not asked
            assert slot_schedule.parts == len(slots)
            return trace
    raise AssertionError(f"it never ends: {trace}")


either_way = pytest.mark.parametrize("has_arrived", [False, True])
reading_ahead = pytest.mark.parametrize("lookahead", [0, 1, 3, 50])


@either_way
@reading_ahead
def test_entries_and_merges_come_between_the_same_slots(lookahead: int, has_arrived: bool) -> None:
    """Merged late, at once, at an event, and after one step; arrival times of the averages play no part."""
    slots = [0, 1, 3, 5, 6, 8, 9, 11]
    rounds = [
        START,
        Round(4, entered=3, merged=4, scale=1.25),
        Round(6, entered=4, merged=4, scale=1.25),
        Round(9, entered=5, merged=7, scale=1.5),
        Round(11, entered=7, merged=7, scale=1.5),
        Round(12, entered=8, merged=8, scale=1.75),
    ]
    assert play(slots, rounds, (6, 12), lookahead, has_arrived) == [
        *(0, 1, 3, ("enter", 5), 5, ("merge", 1, 1.25)),
        *(("enter", 6), ("merge", 0, 1.25)),
        *(6, ("enter", 8), 8, 9, ("merge", 2, 1.5)),
        *(("enter", 11), ("merge", 0, 1.5)),
        *(11, ("enter", 12), ("merge", 0, 1.75)),
    ]


@either_way
@reading_ahead
def test_a_rank_may_enter_rounds_before_it_has_trained_anything(lookahead: int, has_arrived: bool) -> None:
    """Its first windows had no slot for it: those rounds come before its first slot in the replay too."""
    rounds = [START, Round(2, 0, 0, 1.0), Round(3, 0, 1, 1.0), Round(6, 2, 2, 1.0)]
    assert play([4, 5], rounds, (6,), lookahead, has_arrived) == [
        *(("enter", 4), ("merge", 0, 1.0), ("enter", 4), 4, ("merge", 1, 1.0)),
        *(5, ("enter", 6), ("merge", 0, 1.0)),
    ]


def test_a_rank_without_slots_goes_through_every_round() -> None:
    rounds = [START, Round(2, 0, 0, 1.0), Round(4, 0, 0, 1.0)]
    assert play([], rounds, (4,)) == [("enter", 4), ("merge", 0, 1.0)] * 2


def test_the_scale_before_the_first_round_is_that_of_round_0() -> None:
    windows = RecordedWindows([START._replace(scale=1.6), Round(4, 2, 2, 2.0)], 2, events_at(4), [2.0, 2.0])
    assert windows.scale == 1.6
    windows.note([RoundReport(next_slot=4), RoundReport(next_slot=4)])
    assert (windows.scale, windows.is_over, windows.start) == (2.0, True, 4)


def test_what_was_trained_stands_for_the_counts_and_every_rank_has_some() -> None:
    windows = RecordedWindows([START, Round(4, 4, 4, 1.0)], 2, events_at(4), [4.0, 0.0])
    assert windows.counts == (4, 1)
    assert (windows.due, windows.event, windows.is_blocking, windows.is_measured) == (4, 4, False, True)


def test_fingerprints_differ_between_rounds_so_that_ranks_out_of_step_are_found() -> None:
    windows = RecordedWindows([START, Round(2, 1, 1, 1.0), Round(4, 2, 2, 1.0)], 2, events_at(4), [2.0, 2.0])
    first = windows.fingerprint()
    windows.note([RoundReport(next_slot=2), RoundReport(next_slot=2)])
    assert windows.fingerprint() != first


# The log that they are read from.

AXIS = Axis(samples=8, slot_size=2, epochs=1)
RECORD: dict[str, Any] = {
    "version": 1,
    "dataset_samples": 8,
    "slots": 4,
    "config": {"batch_size": 2, "optimizer_state": None},
    "ranks": [[[0, 0, 2], [2, 4, 2], [3, 6, 2]], [[1, 2, 2]]],
    "rounds": [
        [[0, 0, 0, 1.0], [2, 1, 2, 1.5], [4, 3, 3, 1.6]],
        [[0, 0, 0, 1.0], [2, 1, 1, 1.5], [4, 1, 1, 1.6]],
    ],
}


def read(folder: Path, is_local: bool = True, **changes: Any) -> Log:
    (folder / "log.json").write_text(json.dumps({**RECORD, **changes}))
    return read_log(folder, AXIS, 2, {"batch_size": 2, "optimizer_state": None}, is_local)


def test_a_log_gives_every_rank_its_slots_and_rounds(tmp_path: Path) -> None:
    log = read(tmp_path)
    assert log.parts == [[(0, 0, 2), (2, 4, 2), (3, 6, 2)], [(1, 2, 2)]]
    assert log.rounds[0][1] == Round(due=2, entered=1, merged=2, scale=1.5)
    trace = play([slot for slot, _, _ in log.parts[0]], log.rounds[0], (4,))
    assert trace == [0, ("enter", 2), 2, ("merge", 1, 1.5), 3, ("enter", 4), ("merge", 0, 1.6)]


@pytest.mark.parametrize(
    ("rank", "rounds", "words"),
    [
        (1, [[0, 0, 0, 1.0], [4, 1, 1, 1.6]], "rank 1 has other rounds than rank 0"),
        (1, [[0, 0, 0, 1.0], [3, 1, 1, 1.5], [4, 1, 1, 1.6]], "rank 1 has other rounds"),
        (1, [[0, 0, 0, 1.0], [2, 1, 1, 1.7], [4, 1, 1, 1.6]], "rank 1 has other rounds"),
        (0, [[0, 0, 0, 1.0], [2, 1, 2, 1.5], [4, 2, 2, 1.6]], "rank 0's rounds do not lie between its 3 slots"),
        (0, [[0, 0, 0, 1.0], [2, 2, 1, 1.5], [4, 3, 3, 1.6]], "rank 0's rounds do not lie"),
        (1, [], "rank 1 has other rounds"),
    ],
)
def test_rounds_that_ranks_would_hang_in_are_refused(tmp_path: Path, rank: int, rounds: list[Any], words: str) -> None:
    damaged = list(RECORD["rounds"])
    damaged[rank] = rounds
    with pytest.raises(InputError, match=f"log.json is damaged: {words}"):
        read(tmp_path, rounds=damaged)


def test_rounds_of_too_few_ranks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="1 ranks have rounds and 2 have slots"):
        read(tmp_path, rounds=RECORD["rounds"][:1])


@pytest.mark.parametrize("rounds", [[[], []], []])
def test_a_log_is_replayed_by_a_policy_of_its_kind(tmp_path: Path, rounds: list[Any]) -> None:
    with pytest.raises(InputError, match="had as policy a local policy, this one an exact policy; pass policy='cad"):
        read(tmp_path, is_local=False)
    with pytest.raises(InputError, match="had as policy an exact policy, this one a local policy; pass policy='bal"):
        read(tmp_path, rounds=rounds)
    assert read(tmp_path, is_local=False, rounds=rounds).rounds == rounds


@pytest.mark.parametrize("key", ["ranks", "config", "dataset_samples", "slots"])
def test_a_log_that_lacks_something_says_what(tmp_path: Path, key: str) -> None:
    (tmp_path / "log.json").write_text(json.dumps({name: part for name, part in RECORD.items() if name != key}))
    with pytest.raises(InputError, match=f"not the log of a run .without {key}"):
        read_log(tmp_path, AXIS, 2, {}, is_local=True)


def test_a_run_in_which_ranks_were_lost_or_joined_is_refused(tmp_path: Path) -> None:
    segments = [{"slot": 0, "devices": ["cpu", "cpu"]}, {"slot": 2, "devices": ["cpu"], "generation": 1}]
    with pytest.raises(InputError, match="lost or joined"):
        read(tmp_path, segments=segments)


def test_more_than_two_ranks_are_replayed_over_the_same_transport(tmp_path: Path) -> None:
    """A sum of two has the same bits over any; with more each transport adds in an order of its own."""
    record = {**RECORD, "config": {"batch_size": 2, "backend": "gloo"}, "rounds": []}
    own = {"batch_size": 2, "backend": "shm"}
    (tmp_path / "log.json").write_text(json.dumps(record))
    assert read_log(tmp_path, AXIS, 2, own, is_local=False).parts[1] == [(1, 2, 2)]
    (tmp_path / "log.json").write_text(json.dumps({**record, "ranks": [*RECORD["ranks"], []]}))
    with pytest.raises(InputError, match="that run had backend gloo, this one shm; pass backend='gloo'"):
        read_log(tmp_path, AXIS, 3, own, is_local=False)
    assert len(read_log(tmp_path, AXIS, 3, {**own, "backend": "gloo"}, is_local=False).parts) == 3


def test_a_run_over_machines_is_replayed_with_as_many_ranks_on_each(tmp_path: Path) -> None:
    """Ranks of a machine are summed first, so another division of the same ranks rounds differently."""
    own = {"batch_size": 2, "backend": "cpu"}
    ranks = [*RECORD["ranks"], []]
    record = {**RECORD, "config": {**own, "machines": [0, 1, 1]}, "rounds": [], "ranks": ranks}
    (tmp_path / "log.json").write_text(json.dumps(record))
    assert len(read_log(tmp_path, AXIS, 3, own, False, machines=(0, 1, 1)).parts) == 3
    for other in ((0, 0, 1), (), (0, 1, 2)):
        with pytest.raises(InputError, match=r"that run had ranks on machines \[0, 1, 1\], this one .*; start as many"):
            read_log(tmp_path, AXIS, 3, own, False, machines=other)
    head = log_record(ranks, [], [], 4, 2, {**own, "machines": [0, 1, 1], "progress": "off"})
    assert head["config"] == record["config"]
