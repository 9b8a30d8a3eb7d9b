"""The report of `uneven chaos`: what the log of a run says about its samples, and when all is well."""

import json
from pathlib import Path
from typing import Any

import pytest

from uneven.bench.chaos.report import ChaosReport, Counted, Injected, Settled, count_samples

# Two epochs of 10 samples in slots of 4, on two ranks.
WHOLE = [
    [[0, 0, 3], [1, 4, 2], [2, 8, 1], [3, 0, 4], [4, 4, 0], [5, 8, 2]],
    [[0, 3, 1], [1, 6, 2], [2, 9, 1], [4, 4, 4]],
]


def log_of(ranks: Any, **changes: Any) -> dict[str, Any]:
    return {"slots": 6, "ranks": ranks, "skipped": [], "dataset_samples": 10, **changes}


def without(rank: int, place: int) -> list[list[list[int]]]:
    return [[part for n, part in enumerate(log) if (r, n) != (rank, place)] for r, log in enumerate(WHOLE)]


def test_a_whole_log() -> None:
    assert count_samples(log_of(WHOLE)) == Counted(20, 0, 0)
    assert count_samples(log_of([WHOLE[0], [], WHOLE[1]])) == Counted(20, 0, 0)


@pytest.mark.parametrize(
    ("ranks", "lost", "doubled"),
    [
        (without(0, 0), 3, 0),  # the first part of the run
        (without(0, 1), 2, 0),
        (without(1, 1), 2, 0),
        (without(0, 3), 4, 0),  # a whole slot, the first of an epoch
        (without(1, 3), 4, 0),  # a whole slot inside an epoch
        ([*WHOLE, [[3, 0, 4]]], 0, 4),
        ([*WHOLE, [[1, 5, 2]]], 0, 2),
        ([*WHOLE, [[9, 0, 4]]], 0, 4),  # beyond the end
    ],
)
def test_what_is_lost_or_doubled_is_counted(ranks: Any, lost: int, doubled: int) -> None:
    found = count_samples(log_of(ranks))
    assert (found.lost, found.doubled) == (lost, doubled)


def test_what_a_loop_left_out_is_not_lost() -> None:
    assert count_samples(log_of(without(1, 3), skipped=[[1, 4]])).lost == 0


def test_a_report_is_right_when_the_run_ended_and_counts_once(tmp_path: Path) -> None:
    report = ChaosReport(0, ranks=3, exit_code=0, faults=[Injected(1.0, 1, "kill", 0.25)])
    report.read_results(tmp_path)
    assert not report.right
    assert "no finished state" in report.why
    (tmp_path / "state.json").write_text(json.dumps({"finished": True}))
    (tmp_path / "log.json").write_text(json.dumps(log_of(WHOLE)))
    report.read_results(tmp_path)
    assert report.right
    assert report.trained_again is None
    events = [
        {"t": 9, "rank": rank, "kind": "generation", "number": 1, "ms": ms, "again": 8}
        for rank, ms in enumerate((3, 5))
    ]
    (tmp_path / "timeline.json").write_text(json.dumps({"events": [{"kind": "epoch"}, *events]}))
    (tmp_path / "log.json").write_text(json.dumps(log_of(WHOLE, rounds=[[[0, 0, 0, 1.0]], []])))
    report.read_results(tmp_path)
    assert report.generations == [{"number": 1, "ms": 5, "again": 8}]
    assert report.trained_again == 8
    assert report.samples is not None
    assert (report.exactly_once, report.samples.samples) == (True, 20)
    assert report.settled == Settled(1, 0.25, 0.25)
    assert any("every one exactly once" in line for line in report.lines())
    (tmp_path / "log.json").write_text(json.dumps(log_of(without(0, 1))))
    report.read_results(tmp_path)
    assert not report.right
    assert report.why == "2 samples were lost and 0 trained twice"
    report.exit_code = 1
    assert "exit code 1 after 1 fault" in report.why


def test_what_was_trained_since_a_checkpoint_that_all_went_back_to_is_told(tmp_path: Path) -> None:
    """Shards without a copy: an exact policy, and more than a step."""
    segments = [{"slot": 0}, {"slot": 1, "generation": 1, "checkpoint": "step-1", "again_samples": 12}]
    event = {"t": 9, "rank": 0, "kind": "generation", "number": 1, "ms": 3, "again": 12}
    (tmp_path / "state.json").write_text(json.dumps({"finished": True}))
    (tmp_path / "log.json").write_text(json.dumps(log_of(WHOLE, segments=segments)))
    (tmp_path / "timeline.json").write_text(json.dumps({"events": [event]}))
    report = ChaosReport(0, ranks=3, exit_code=0, faults=[Injected(1.0, 1, "kill", 0.25)])
    report.read_results(tmp_path)
    assert report.trained_again == 12
    again = "trained again  12 samples since a checkpoint, and at most a step for each rank that was lost"
    assert again in report.lines()


def test_one_fault_is_one_fault() -> None:
    assert ChaosReport(0, exit_code=1, faults=[Injected(1.0, 1, "kill")]).why.endswith("exit code 1 after 1 fault")
